# DINO on five levels, the first of which has a quarter of the image's resolution.
_base_ = ["./dino-4scale_r50_8xb2-12e_coco.py"]

num_levels = 5
model = dict(
    num_feature_levels=num_levels,
    backbone=dict(out_indices=(0, 1, 2, 3)),
    neck=dict(in_channels=[256, 512, 1024, 2048], num_outs=num_levels),
    encoder=dict(layer_cfg=dict(self_attn_cfg=dict(num_levels=num_levels))),
    decoder=dict(layer_cfg=dict(cross_attn_cfg=dict(num_levels=num_levels))),
)
