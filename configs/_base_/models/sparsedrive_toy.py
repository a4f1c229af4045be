# A small SparseDrive for the driving scenes with six cameras of 256 x 96 pixels. It has a ResNet-18 of half width,
# three levels, three decoder layers, and denoising. This command makes its anchors: visdet make-anchors
# data/driving_scenes --out-dir data/driving_scenes --det 128 --map 30 --plan 1 --max-distance 33.
_base_ = "./sparsedrive_r50.py"

embed_dims = 96
num_groups = 4
num_levels = 3
dropout = 0.0
num_classes = 5
ego_fut_mode = 1  # learning to choose among several modes of a command takes more than minutes

first_layer = ["deformable", "ffn", "norm", "refine"]
self_attention = ["gnn", "norm"]
later_layer = ["temp_gnn", *self_attention, *first_layer]
norm_layer = dict(normalized_shape=embed_dims)
ffn = dict(
    in_channels=embed_dims * 2, embed_dims=embed_dims, feedforward_channels=embed_dims * 2, ffn_drop=dropout
)
attention = dict(embed_dims=embed_dims, num_heads=num_groups, dropout=dropout)
decoupled_attention = dict(embed_dims=embed_dims * 2, num_heads=num_groups, dropout=dropout)
line_key_points = dict(embed_dims=embed_dims, fix_height=(0,), ground_height=-1.84)
aggregation = dict(embed_dims=embed_dims, num_groups=num_groups, num_levels=num_levels, attn_drop=0.0)

det_head = dict(
    cls_threshold_to_reg=-1,
    instance_bank=dict(
        num_anchor=128,
        embed_dims=embed_dims,
        anchor="data/driving_scenes/kmeans_det_128.npy",
        num_temp_instances=48,
    ),
    anchor_encoder=dict(embed_dims=[48, 16, 16, 16], out_loops=2),
    num_decoder=3,
    operation_order=first_layer + later_layer * 2,
    temp_graph_model=decoupled_attention,
    graph_model=decoupled_attention,
    norm_layer=norm_layer,
    ffn=ffn,
    deformable_model=aggregation,
    refine_layer=dict(embed_dims=embed_dims, num_cls=num_classes),
    sampler=dict(
        num_dn_groups=3,
        num_temp_dn_groups=2,
        # A traffic cone has no yaw.
        cls_wise_reg_weights={"_delete_": True, 4: [2.0] * 3 + [1.0] * 3 + [0.0] * 2 + [1.0] * 2},
    ),
    loss_reg=dict(cls_allow_reverse=None),
    # After so short a training, several boxes of an object have high scores.
    decoder=dict(num_output=100, min_distance=1.5),
)

map_head = dict(
    cls_threshold_to_reg=-1,
    instance_bank=dict(
        num_anchor=30,
        embed_dims=embed_dims,
        anchor="data/driving_scenes/kmeans_map_30.npy",
        num_temp_instances=10,
    ),
    anchor_encoder=dict(embed_dims=embed_dims),
    num_decoder=3,
    operation_order=self_attention + first_layer + later_layer * 2,
    temp_graph_model=attention,
    graph_model=attention,
    norm_layer=norm_layer,
    ffn=ffn,
    deformable_model=dict(aggregation, kps_generator=line_key_points),
    refine_layer=dict(embed_dims=embed_dims),
)

motion_plan_head = dict(
    ego_fut_mode=ego_fut_mode,
    num_classes=num_classes,
    motion_anchor="data/driving_scenes/kmeans_motion_6.npy",
    plan_anchor="data/driving_scenes/kmeans_plan_1.npy",
    embed_dims=embed_dims,
    instance_queue=dict(embed_dims=embed_dims, ego_motion_from_poses=True),
    temp_graph_model=decoupled_attention,
    graph_model=decoupled_attention,
    cross_graph_model=attention,
    norm_layer=norm_layer,
    ffn=dict(ffn, in_channels=embed_dims),
    refine_layer=dict(embed_dims=embed_dims, ego_fut_mode=ego_fut_mode),
    planning_sampler=dict(ego_fut_mode=ego_fut_mode),
    planning_decoder=dict(ego_fut_mode=ego_fut_mode),
    num_det=30,
    plan_step_s=0.5,
)

model = dict(
    use_grid_mask=False,
    channels_last=True,
    img_backbone=dict(
        depth=18, base_channels=32, num_stages=3, with_cp=False, out_indices=(0, 1, 2), init_cfg=None
    ),
    # Dense 3x3 convolutions would take a quarter of a training step on a CPU. Xavier's scale is too small for depthwise
    # ones, because it counts as many outputs of each input as there are channels.
    img_neck=dict(
        num_outs=num_levels,
        out_channels=embed_dims,
        in_channels=[32, 64, 128],
        out_groups=embed_dims,
        init_cfg=dict(
            type="Xavier",
            layer="Conv2d",
            distribution="uniform",
            override=dict(type="Kaiming", name="fpn_convs", mode="fan_in", nonlinearity="linear"),
        ),
    ),
    depth_branch=dict(embed_dims=embed_dims),
    head=dict(det_head=det_head, map_head=map_head),
)
