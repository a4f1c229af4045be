# A short schedule for the driving scenes. The cosine ends with training, so that
# `--cfg-options train_cfg.max_iters=400` is a whole schedule of 400 iterations.
train_cfg = dict(type="IterBasedTrainLoop", max_iters=1200, val_interval=1200)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(
        type="MuonWithAuxAdam",
        lr=4e-3,
        betas=(0.9, 0.98),
        weight_decay=1e-3,
        momentum=0.9,
        ns_steps=4,
        fused=True,
    ),
    clip_grad=dict(max_norm=25, norm_type=2),
)

param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, begin=0, end=50, by_epoch=False),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.01, begin=50, by_epoch=False),
]

auto_scale_lr = dict(base_batch_size=4)
