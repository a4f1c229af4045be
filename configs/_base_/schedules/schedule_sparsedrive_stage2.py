# SparseDrive's published second stage of 10 epochs of 28130 frames, with a total batch size of 48, in bfloat16.
train_cfg = dict(type="IterBasedTrainLoop", max_iters=5860, val_interval=2930)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

optim_wrapper = dict(
    type="AmpOptimWrapper",
    dtype="bfloat16",
    optimizer=dict(type="AdamW", lr=3e-4, weight_decay=1e-3, fused=True),
    clip_grad=dict(max_norm=25, norm_type=2),
    paramwise_cfg=dict(custom_keys={"img_backbone": dict(lr_mult=0.1)}),
)

param_scheduler = [
    dict(type="LinearLR", start_factor=1.0 / 3, begin=0, end=500, by_epoch=False),
    dict(type="CosineAnnealingLR", eta_min_ratio=1e-3, begin=0, by_epoch=False),
]

auto_scale_lr = dict(base_batch_size=48)
