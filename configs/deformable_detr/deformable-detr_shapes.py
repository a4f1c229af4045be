# Two-stage Deformable DETR with box refinement on the shapes data set, from scratch in minutes on two CPU cores.
_base_ = [
    "../_base_/datasets/shapes_detection.py",
    "../_base_/schedules/schedule_shapes.py",
    "../_base_/default_runtime.py",
]

embed_dims = 96
num_heads = 6
deformable_attention = dict(
    embed_dims=embed_dims, num_heads=num_heads, num_levels=3, dropout=0.0, batch_first=True
)
feed_forward = dict(embed_dims=embed_dims, feedforward_channels=256, ffn_drop=0.0)

model = dict(
    type="DeformableDETR",
    num_queries=30,
    num_feature_levels=3,
    with_box_refine=True,
    as_two_stage=True,
    data_preprocessor=dict(
        type="DetDataPreprocessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=False,
    ),
    backbone=dict(
        type="ResNet",
        depth=18,
        base_channels=32,
        out_indices=(1, 2, 3),
        norm_cfg=dict(type="BN", requires_grad=True),
        norm_eval=False,
    ),
    neck=dict(
        type="ChannelMapper",
        in_channels=[64, 128, 256],
        kernel_size=1,
        out_channels=embed_dims,
        act_cfg=None,
        norm_cfg=dict(type="GN", num_groups=16),
    ),
    encoder=dict(num_layers=2, layer_cfg=dict(self_attn_cfg=deformable_attention, ffn_cfg=feed_forward)),
    decoder=dict(
        num_layers=3,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=embed_dims, num_heads=num_heads, dropout=0.0, batch_first=True),
            cross_attn_cfg=deformable_attention,
            ffn_cfg=feed_forward,
        ),
    ),
    positional_encoding=dict(num_feats=embed_dims // 2, normalize=True, offset=-0.5),
    bbox_head=dict(
        type="DeformableDETRHead",
        num_classes=6,
        loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=2.0),
        loss_bbox=dict(type="L1Loss", loss_weight=5.0),
        loss_iou=dict(type="GIoULoss", loss_weight=2.0),
    ),
    train_cfg=dict(
        assigner=dict(
            type="HungarianAssigner",
            match_costs=[
                dict(type="FocalLossCost", weight=2.0),
                dict(type="BBoxL1Cost", weight=5.0, box_format="xywh"),
                dict(type="IoUCost", iou_mode="giou", weight=2.0),
            ],
        )
    ),
    test_cfg=dict(max_per_img=100),
)
randomness = dict(seed=0)
