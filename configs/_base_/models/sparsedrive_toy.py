# A small SparseDrive for the driving scenes, six cameras of 256 x 96 pixels: ResNet-18 of half width, three levels,
# three decoder layers, denoising on. Anchors: tools/make_anchors.py data/driving_scenes --out-dir data/driving_scenes
# --det 128 --map 30 --plan 1 --max-distance 33.
embed_dims = 96
num_groups = 4
num_levels = 3
dropout = 0.0
num_classes = 5
num_map_classes = 3
num_sample = 20  # points of a polyline
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
    feedforward_channels=embed_dims * 2,
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
    fix_height=(0,),
    ground_height=-1.84,
)

det_head = dict(
    type="Sparse4DHead",
    cls_threshold_to_reg=-1,
    decouple_attn=True,
    instance_bank=dict(
        type="InstanceBank",
        num_anchor=128,
        embed_dims=embed_dims,
        anchor="data/driving_scenes/kmeans_det_128.npy",
        anchor_handler=dict(type="SparseBox3DKeyPointsGenerator"),
        num_temp_instances=48,
        confidence_decay=0.6,
        feat_grad=False,
    ),
    anchor_encoder=dict(
        type="SparseBox3DEncoder",
        vel_dims=3,
        embed_dims=[48, 16, 16, 16],
        mode="cat",
        output_fc=False,
        in_loops=1,
        out_loops=2,
    ),
    num_decoder=3,
    num_single_frame_decoder=1,
    operation_order=first_layer + later_layer * 2,
    temp_graph_model=decoupled_attention,
    graph_model=decoupled_attention,
    norm_layer=norm_layer,
    ffn=ffn,
    deformable_model=dict(
        type="DeformableFeatureAggregation",
        embed_dims=embed_dims,
        num_groups=num_groups,
        num_levels=num_levels,
        num_cams=6,
        attn_drop=0.0,
        use_deformable_func=True,
        use_camera_embed=True,
        residual_mode="cat",
        kps_generator=box_key_points,
    ),
    refine_layer=dict(
        type="SparseBox3DRefinementModule",
        embed_dims=embed_dims,
        num_cls=num_classes,
        refine_yaw=True,
        with_quality_estimation=True,
    ),
    sampler=dict(
        type="SparseBox3DTarget",
        num_dn_groups=3,
        num_temp_dn_groups=2,
        dn_noise_scale=[2.0] * 3 + [0.5] * 7,
        max_dn_gt=32,
        add_neg_dn=True,
        cls_weight=2.0,
        box_weight=0.25,
        reg_weights=[2.0] * 3 + [0.5] * 3 + [0.0] * 4,
        cls_wise_reg_weights={4: [2.0] * 3 + [1.0] * 3 + [0.0] * 2 + [1.0] * 2},  # a traffic cone has no yaw
    ),
    loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=2.0),
    loss_reg=dict(
        type="SparseBox3DLoss",
        loss_box=dict(type="L1Loss", loss_weight=0.25),
        loss_centerness=dict(type="CrossEntropyLoss", use_sigmoid=True),
        loss_yawness=dict(type="GaussianFocalLoss"),
    ),
    decoder=dict(type="SparseBox3DDecoder", num_output=100),
    reg_weights=[2.0] * 3 + [1.0] * 7,
)

map_head = dict(
    type="Sparse4DHead",
    cls_threshold_to_reg=-1,
    decouple_attn=False,
    instance_bank=dict(
        type="InstanceBank",
        num_anchor=30,
        embed_dims=embed_dims,
        anchor="data/driving_scenes/kmeans_map_30.npy",
        anchor_handler=dict(type="SparsePoint3DKeyPointsGenerator"),
        num_temp_instances=10,
        confidence_decay=0.6,
        feat_grad=True,
    ),
    anchor_encoder=dict(type="SparsePoint3DEncoder", embed_dims=embed_dims, num_sample=num_sample),
    num_decoder=3,
    num_single_frame_decoder=1,
    operation_order=self_attention + first_layer + later_layer * 2,
    temp_graph_model=attention,
    graph_model=attention,
    norm_layer=norm_layer,
    ffn=ffn,
    deformable_model=dict(
        type="DeformableFeatureAggregation",
        embed_dims=embed_dims,
        num_groups=num_groups,
        num_levels=num_levels,
        num_cams=6,
        attn_drop=0.0,
        use_deformable_func=True,
        use_camera_embed=True,
        residual_mode="cat",
        kps_generator=line_key_points,
    ),
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

model = dict(
    type="SparseDrive",
    use_grid_mask=False,
    use_deformable_func=True,
    channels_last=True,
    img_backbone=dict(
        type="ResNet",
        depth=18,
        base_channels=32,
        num_stages=3,
        frozen_stages=-1,
        norm_eval=False,
        style="pytorch",
        with_cp=False,
        out_indices=(0, 1, 2),
        norm_cfg=dict(type="BN", requires_grad=True),
    ),
    img_neck=dict(
        type="FPN",
        num_outs=num_levels,
        start_level=0,
        out_channels=embed_dims,
        add_extra_convs="on_output",
        relu_before_extra_convs=True,
        in_channels=[32, 64, 128],
    ),
    depth_branch=dict(type="DenseDepthNet", embed_dims=embed_dims, num_depth_layers=3, loss_weight=0.2),
    head=dict(
        type="SparseDriveHead",
        task_config=dict(with_det=True, with_map=True, with_motion_plan=False),
        det_head=det_head,
        map_head=map_head,
    ),
)
