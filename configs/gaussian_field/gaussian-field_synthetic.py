# 200 Gaussians on a synthetic volume of 48^3 voxels, in under a minute on two CPU cores.
_base_ = ["../_base_/schedules/schedule_gaussian_field.py", "../_base_/default_runtime.py"]

model = dict(type="LearnableGaussianField", num_gaussians=200, volume_size=10.0, use_full_cov=True)

dataset = dict(type="VolumeDataset", synthetic=dict(size=48, num_blobs=12, seed=0), volume_size=10.0)
train_dataloader = dict(
    batch_size=4096,  # points of an iteration and process
    num_workers=0,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dataset,
)
val_dataloader = dict(
    batch_size=1,  # the whole volume
    num_workers=0,
    drop_last=False,
    sampler=dict(type="DefaultSampler", shuffle=False, round_up=False),
    dataset=dict(dataset, test_mode=True),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="FieldMetric")
test_evaluator = val_evaluator

default_hooks = dict(
    checkpoint=dict(type="CheckpointHook", max_keep_ckpts=3, save_best="field/psnr", rule="greater"),
)
custom_hooks = [
    dict(type="InitializeFieldHook", method="kmeans"),
    dict(type="SplitGaussiansHook", interval=100),
]
visualizer = dict(type="FieldVisualizer")
randomness = dict(seed=0)
