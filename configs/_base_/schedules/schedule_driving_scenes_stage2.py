# A short schedule for motion and planning on the driving scenes. The weights of the first stage stay as they are.
train_cfg = dict(type="IterBasedTrainLoop", max_iters=400, val_interval=400)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=2e-3, weight_decay=1e-3, fused=True),
    clip_grad=dict(max_norm=25, norm_type=2),
)

param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, begin=0, end=50, by_epoch=False),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.01, begin=50, by_epoch=False),
]

auto_scale_lr = dict(base_batch_size=8)
