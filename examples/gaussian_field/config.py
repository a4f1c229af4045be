# 200 Gaussians on a synthetic volume of 48^3 voxels, in under a minute on two CPU cores. A volume of your own is the
# `path` of the data sets.
_base_ = ["visdet::_base_/default_runtime.py"]
custom_imports = dict(imports=["gaussian_field"], allow_failed_imports=False)

model = dict(type="LearnableGaussianField", num_gaussians=200)
train_dataloader = dict(
    batch_size=4096,  # voxels of an iteration
    num_workers=0,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(type="VolumeDataset"),
)
val_dataloader = dict(
    batch_size=1,  # the whole volume
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="VolumeDataset", test_mode=True),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="FieldMetric")
test_evaluator = val_evaluator

train_cfg = dict(type="IterBasedTrainLoop", max_iters=1000, val_interval=500)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="Adam", lr=0.02, fused=True))
param_scheduler = [dict(type="CosineAnnealingLR", eta_min_ratio=0.02, by_epoch=False)]
default_hooks = dict(checkpoint=dict(save_best="field/psnr", rule="greater"), visualization=None)
custom_hooks = [dict(type="InitializeFieldHook")]
randomness = dict(seed=0)
