# SparseDrive with ResNet-50 on six cameras of 704 x 256 pixels, with detection and the online map (stage 1).
embed_dims = 256
num_groups = 8
num_levels = 4
dropout = 0.1
num_classes = 10
num_map_classes = 3
num_sample = 20  # number of points of a polyline
map_region = (30, 60)  # metres

first_layer = ["deformable", "ffn", "norm", "refine"]
self_attention = ["gnn", "norm"]
later_layer = ["temp_gnn", *self_attention, *first_layer]
norm_layer = dict(type="LN", normalized_shape=embed_dims)
ffn = dict(
    type="AsymmetricFFN",
    in_channels=embed_dims * 2,
    pre_norm=dict(type="LN"),
    embed_dims=embed_dims,
    feedforward_channels=embed_dims * 4,
    num_fcs=2,
    ffn_drop=dropout,
    act_cfg=dict(type="ReLU", inplace=True),
)
attention = dict(
    type="MultiheadFlashAttention",
    embed_dims=embed_dims,
    num_heads=num_groups,
    batch_first=True,
    dropout=dropout,
)
decoupled_attention = dict(
    type="MultiheadFlashAttention",
    embed_dims=embed_dims * 2,
    num_heads=num_groups,
    batch_first=True,
    dropout=dropout,
)
box_key_points = dict(
    type="SparseBox3DKeyPointsGenerator",
    num_learnable_pts=6,
    fix_scale=[
        [0, 0, 0],
        [0.45, 0, 0],
        [-0.45, 0, 0],
        [0, 0.45, 0],
        [0, -0.45, 0],
        [0, 0, 0.45],
        [0, 0, -0.45],
    ],
)
line_key_points = dict(
    type="SparsePoint3DKeyPointsGenerator",
    embed_dims=embed_dims,
    num_sample=num_sample,
    num_learnable_pts=3,
    fix_height=(0, 0.5, -0.5, 1, -1),
    ground_height=-1.84023,
)
aggregation = dict(
    type="DeformableFeatureAggregation",
    embed_dims=embed_dims,
    num_groups=num_groups,
    num_levels=num_levels,
    num_cams=6,
    attn_drop=0.15,
    use_deformable_func=True,
    use_camera_embed=True,
    residual_mode="cat",
)

det_head = dict(
    type="Sparse4DHead",
    cls_threshold_to_reg=0.05,
    decouple_attn=True,
    instance_bank=dict(
        type="InstanceBank",
        num_anchor=900,
        embed_dims=embed_dims,
        anchor="data/kmeans/kmeans_det_900.npy",
        anchor_handler=dict(type="SparseBox3DKeyPointsGenerator"),
        num_temp_instances=600,
        confidence_decay=0.6,
        feat_grad=False,
    ),
    anchor_encoder=dict(
        type="SparseBox3DEncoder",
        vel_dims=3,
        embed_dims=[128, 32, 32, 64],
        mode="cat",
        output_fc=False,
        in_loops=1,
        out_loops=4,
    ),
    num_decoder=6,
    num_single_frame_decoder=1,
    operation_order=first_layer + later_layer * 5,
    temp_graph_model=decoupled_attention,
    graph_model=decoupled_attention,
    norm_layer=norm_layer,
    ffn=ffn,
    deformable_model=dict(aggregation, kps_generator=box_key_points),
    refine_layer=dict(
        type="SparseBox3DRefinementModule",
        embed_dims=embed_dims,
        num_cls=num_classes,
        refine_yaw=True,
        with_quality_estimation=True,
    ),
    sampler=dict(
        type="SparseBox3DTarget",
        num_dn_groups=0,
        num_temp_dn_groups=0,
        dn_noise_scale=[2.0] * 3 + [0.5] * 7,
        max_dn_gt=32,
        add_neg_dn=True,
        cls_weight=2.0,
        box_weight=0.25,
        reg_weights=[2.0] * 3 + [0.5] * 3 + [0.0] * 4,
        cls_wise_reg_weights={9: [2.0] * 3 + [1.0] * 3 + [0.0] * 2 + [1.0] * 2},  # a traffic cone has no yaw
    ),
    loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=2.0),
    loss_reg=dict(
        type="SparseBox3DLoss",
        loss_box=dict(type="L1Loss", loss_weight=0.25),
        loss_centerness=dict(type="CrossEntropyLoss", use_sigmoid=True),
        loss_yawness=dict(type="GaussianFocalLoss"),
        cls_allow_reverse=[5],  # a barrier looks the same from behind
    ),
    decoder=dict(type="SparseBox3DDecoder"),
    reg_weights=[2.0] * 3 + [1.0] * 7,
)

map_head = dict(
    type="Sparse4DHead",
    cls_threshold_to_reg=0.05,
    decouple_attn=False,
    instance_bank=dict(
        type="InstanceBank",
        num_anchor=100,
        embed_dims=embed_dims,
        anchor="data/kmeans/kmeans_map_100.npy",
        anchor_handler=dict(type="SparsePoint3DKeyPointsGenerator"),
        num_temp_instances=0,
        confidence_decay=0.6,
        feat_grad=True,
    ),
    anchor_encoder=dict(type="SparsePoint3DEncoder", embed_dims=embed_dims, num_sample=num_sample),
    num_decoder=6,
    num_single_frame_decoder=1,
    operation_order=self_attention + first_layer + later_layer * 5,
    temp_graph_model=attention,
    graph_model=attention,
    norm_layer=norm_layer,
    ffn=ffn,
    deformable_model=dict(aggregation, kps_generator=line_key_points),
    refine_layer=dict(
        type="SparsePoint3DRefinementModule",
        embed_dims=embed_dims,
        num_sample=num_sample,
        num_cls=num_map_classes,
    ),
    sampler=dict(
        type="SparsePoint3DTarget",
        assigner=dict(
            type="HungarianLinesAssigner",
            cost=dict(
                type="MapQueriesCost",
                cls_cost=dict(type="FocalLossCost", weight=1.0),
                reg_cost=dict(type="LinesL1Cost", weight=10.0, beta=0.01, permute=True),
            ),
        ),
        num_cls=num_map_classes,
        num_sample=num_sample,
        roi_size=map_region,
    ),
    loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=1.0),
    loss_reg=dict(
        type="SparseLineLoss",
        loss_line=dict(type="LinesL1Loss", loss_weight=10.0, beta=0.01),
        num_sample=num_sample,
        roi_size=map_region,
    ),
    decoder=dict(type="SparsePoint3DDecoder"),
    reg_weights=[1.0] * 40,
    gt_cls_key="gt_map_labels",
    gt_reg_key="gt_map_pts",
    gt_id_key="map_instance_id",
    with_instance_id=False,
    task_prefix="map",
)

# Motion and planning for the second stage: the numbers of steps of 0.5 s and of modes, for agents and for the vehicle.
fut_ts, fut_mode, ego_fut_ts, ego_fut_mode = 12, 6, 6, 6
motion_layer = ["temp_gnn", "gnn", "norm", "cross_gnn", "norm", "ffn", "norm"]
motion_plan_head = dict(
    type="MotionPlanningHead",
    fut_ts=fut_ts,
    fut_mode=fut_mode,
    ego_fut_ts=ego_fut_ts,
    ego_fut_mode=ego_fut_mode,
    num_classes=num_classes,
    motion_anchor="data/kmeans/kmeans_motion_6.npy",
    plan_anchor="data/kmeans/kmeans_plan_6.npy",
    embed_dims=embed_dims,
    decouple_attn=True,
    instance_queue=dict(type="InstanceQueue", embed_dims=embed_dims, queue_length=4, tracking_threshold=0.2),
    operation_order=motion_layer * 3 + ["refine"],
    temp_graph_model=dict(decoupled_attention, type="MultiheadAttention"),
    graph_model=decoupled_attention,
    cross_graph_model=attention,
    norm_layer=norm_layer,
    ffn=dict(ffn, in_channels=embed_dims, feedforward_channels=embed_dims * 2),
    refine_layer=dict(
        type="MotionPlanningRefinementModule",
        embed_dims=embed_dims,
        fut_ts=fut_ts,
        fut_mode=fut_mode,
        ego_fut_ts=ego_fut_ts,
        ego_fut_mode=ego_fut_mode,
    ),
    motion_sampler=dict(type="MotionTarget"),
    motion_loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=0.2),
    motion_loss_reg=dict(type="L1Loss", loss_weight=0.2),
    planning_sampler=dict(type="PlanningTarget", ego_fut_ts=ego_fut_ts, ego_fut_mode=ego_fut_mode),
    plan_loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=0.5),
    plan_loss_reg=dict(type="L1Loss", loss_weight=1.0),
    plan_loss_status=dict(type="L1Loss", loss_weight=1.0),
    motion_decoder=dict(type="SparseBox3DMotionDecoder"),
    planning_decoder=dict(
        type="HierarchicalPlanningDecoder",
        ego_fut_ts=ego_fut_ts,
        ego_fut_mode=ego_fut_mode,
        use_rescore=True,
    ),
    num_det=50,
    num_map=10,
)

model = dict(
    type="SparseDrive",
    use_grid_mask=True,
    use_deformable_func=True,
    img_backbone=dict(
        type="ResNet",
        depth=50,
        num_stages=4,
        frozen_stages=-1,
        norm_eval=False,
        style="pytorch",
        with_cp=True,
        out_indices=(0, 1, 2, 3),
        norm_cfg=dict(type="BN", requires_grad=True),
        init_cfg=dict(type="Pretrained", checkpoint="torchvision://resnet50"),
    ),
    img_neck=dict(
        type="FPN",
        num_outs=num_levels,
        start_level=0,
        out_channels=embed_dims,
        add_extra_convs="on_output",
        relu_before_extra_convs=True,
        in_channels=[256, 512, 1024, 2048],
    ),
    depth_branch=dict(type="DenseDepthNet", embed_dims=embed_dims, num_depth_layers=3, loss_weight=0.2),
    head=dict(
        type="SparseDriveHead",
        task_config=dict(with_det=True, with_map=True, with_motion_plan=False),
        det_head=det_head,
        map_head=map_head,
    ),
)
