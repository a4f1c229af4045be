"""A run of ToyDetector; the tests change it with --cfg-options."""

custom_imports = dict(imports=["toy_detection"], allow_failed_imports=False)
default_scope = "visdet"
randomness = dict(seed=5)

model = dict(type="ToyDetector")

train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="ToyBoxes", serialize_data=False),
)
val_dataloader = dict(
    batch_size=5,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="ToyBoxes", count=13, jitter=False, serialize_data=False, test_mode=True),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="ToyAccuracy")
test_evaluator = val_evaluator

train_cfg = dict(type="IterBasedTrainLoop", max_iters=20, val_interval=10)
val_cfg = dict()
test_cfg = dict()

optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=1e-2), clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, begin=0, end=5, by_epoch=False),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.01, begin=5, by_epoch=False),
]

default_hooks = dict(
    logger=dict(type="LoggerHook", interval=5),
    checkpoint=dict(type="CheckpointHook", max_keep_ckpts=3, save_best="auto"),
)
visualizer = dict(
    type="Visualizer", vis_backends=[dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")]
)
