# The depth of one view from a second one by attention along epipolar lines, trained from scratch on synthetic pairs in
# minutes on two CPU cores. Every pair is drawn when it is read, and nothing is stored.
_base_ = ["visdet::_base_/default_runtime.py"]
custom_imports = dict(imports=["two_view_depth"], allow_failed_imports=False)

depth_range = (1.5, 6.0)

model = dict(
    type="TwoViewDepth",
    embed_dims=32,
    num_blocks=3,
    num_depths=32,
    depth_range=(1.2, 8.0),  # wider than that of the data, because planes are slanted
    attention=dict(type="FusedSampleAttention", num_heads=2, num_octaves=4),
)

train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(type="TwoViewPairs", num_pairs=4000, depth_range=depth_range, seed=0),
)
val_dataloader = dict(
    batch_size=16,
    num_workers=0,
    drop_last=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="TwoViewPairs", num_pairs=64, depth_range=depth_range, seed=1, test_mode=True),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="TwoViewDepthMetric")
test_evaluator = val_evaluator

train_cfg = dict(type="IterBasedTrainLoop", max_iters=600, val_interval=200)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=2e-3, weight_decay=1e-4),
    clip_grad=dict(max_norm=1.0, norm_type=2),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, begin=0, end=50, by_epoch=False),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.01, begin=50, by_epoch=False),
]

default_hooks = dict(
    checkpoint=dict(save_best="two_view/abs_rel", rule="less"),
    visualization=None,
)
randomness = dict(seed=0)
