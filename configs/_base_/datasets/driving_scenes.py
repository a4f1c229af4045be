# The driving scenes are 160 + 16 + 16 scenes of 20 frames with six cameras of 256 x 96 pixels. They are drawn into
# data_root at the first use, in about a minute on two cores. The map is used within 30 x 60 m.
dataset_type = "DrivingScenesDataset"
data_root = "data/driving_scenes/"
class_names = ["car", "truck", "pedestrian", "bicycle", "traffic_cone"]
map_class_names = ["ped_crossing", "divider", "boundary"]
roi_size = (30, 60)
# Up to these distances in metres, boxes count: 0.6 times the distances of nuScenes. A model learns those up to 3 m
# further away.
class_range = dict(car=30, truck=30, pedestrian=24, bicycle=24, traffic_cone=18)
training_range = [33, 33, 27, 27, 21]
depth_strides = [4, 8, 16]

train_pipeline = [
    dict(type="LoadMultiViewImageFromFiles"),
    dict(type="LoadPointsFromFile", coord_type="LIDAR", load_dim=3, use_dim=3),
    dict(type="ResizeCropFlipImage"),
    dict(type="MultiScaleDepthMapGenerator", downsample=depth_strides),
    dict(type="BBoxRotation"),
    dict(type="CircleObjectRangeFilter", class_dist_thred=training_range),
    dict(type="InstanceNameFilter", classes=class_names),
    dict(type="VectorizeMap", roi_size=roi_size, normalize=False, sample_num=20, permute=True),
    dict(type="NuScenesSparse4DAdaptor"),
    dict(type="PackDrivingInputs"),
]
# The frames carry the ground truth, which the metrics read.
test_pipeline = [
    dict(type="LoadMultiViewImageFromFiles"),
    dict(type="ResizeCropFlipImage"),
    dict(type="CircleObjectRangeFilter", class_dist_thred=[55] * len(class_names)),
    dict(type="InstanceNameFilter", classes=class_names),
    dict(type="VectorizeMap", roi_size=roi_size, normalize=False, simplify=True),
    dict(type="NuScenesSparse4DAdaptor"),
    dict(type="PackDrivingInputs"),
]

data_aug_conf = dict(
    resize_lim=(1.0, 1.0),
    final_dim=(96, 256),
    bot_pct_lim=(0.0, 0.0),
    rot_lim=(0.0, 0.0),
    H=96,
    W=256,
    rand_flip=False,
    rot3d_range=(0.0, 0.0),
)

# Every slot of a batch plays one half scene of ten frames after another.
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    batch_sampler=dict(type="GroupInBatchSampler"),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file="driving_infos_train.npz",
        classes=class_names,
        map_classes=map_class_names,
        pipeline=train_pipeline,
        data_aug_conf=data_aug_conf,
        with_seq_flag=True,
        sequences_split_num=2,
        keep_consistent_seq_aug=True,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=0,
    drop_last=False,
    sampler=dict(type="SceneSampler"),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file="driving_infos_val.npz",
        classes=class_names,
        map_classes=map_class_names,
        pipeline=test_pipeline,
        data_aug_conf=data_aug_conf,
        test_mode=True,
    ),
)
# The settings of the toy models were chosen on the validation split, so that their figures come from this one.
test_dataloader = dict(
    val_dataloader, dataset=dict(val_dataloader["dataset"], ann_file="driving_infos_test.npz")
)

val_evaluator = [
    dict(type="NuScenesMetric", class_range=class_range),
    dict(type="VectorMapMetric"),
]
test_evaluator = val_evaluator

data_preprocessor = dict(
    type="DrivingDataPreprocessor",
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
    bgr_to_rgb=True,
)
