# The cosine ends with training, so that `--cfg-options train_cfg.max_iters=400` is a whole schedule of 400 iterations.
train_cfg = dict(type="IterBasedTrainLoop", max_iters=1000, val_interval=500)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="Adam", lr=0.02, fused=True))
param_scheduler = [dict(type="CosineAnnealingLR", eta_min_ratio=0.02, by_epoch=False)]
