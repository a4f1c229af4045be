# A recording of one's own, with any cameras and classes, and without lidar. docs/driving_data.md says how its info
# files are written, and shows a config that is based on this one. That config names the folder, the files, the classes,
# the number of cameras and the size of the images.
dataset_type = "NuScenes3DDetTrackDataset"
roi_size = (30, 60)
detection_range = 50

train_pipeline = [
    dict(type="LoadMultiViewImageFromFiles", reduces=True),
    dict(type="ResizeCropFlipImage"),
    dict(type="BBoxRotation"),
    dict(type="PhotoMetricDistortionMultiViewImage"),
    dict(type="CircleObjectRangeFilter", class_dist_thred=detection_range + 5),
    dict(type="InstanceNameFilter"),
    dict(type="VectorizeMap", roi_size=roi_size, normalize=False, sample_num=20, permute=True),
    dict(type="NuScenesSparse4DAdaptor"),
    dict(type="PackDrivingInputs"),
]
# The frames carry the ground truth, which the metrics read.
test_pipeline = [
    dict(type="LoadMultiViewImageFromFiles", reduces=True),
    dict(type="ResizeCropFlipImage"),
    dict(type="CircleObjectRangeFilter", class_dist_thred=detection_range + 5),
    dict(type="InstanceNameFilter"),
    dict(type="VectorizeMap", roi_size=roi_size, normalize=False, simplify=True),
    dict(type="NuScenesSparse4DAdaptor"),
    dict(type="PackDrivingInputs"),
]

data_aug_conf = dict(bot_pct_lim=(0.0, 0.0), rot_lim=(0.0, 0.0), rand_flip=False, rot3d_range=(0.0, 0.0))

# Every slot of a batch plays one half scene after another.
train_dataloader = dict(
    batch_size=2,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    batch_sampler=dict(type="GroupInBatchSampler"),
    dataset=dict(
        type=dataset_type,
        pipeline=train_pipeline,
        data_aug_conf=data_aug_conf,
        with_seq_flag=True,
        sequences_split_num=2,
        keep_consistent_seq_aug=True,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type="SceneSampler"),
    dataset=dict(type=dataset_type, pipeline=test_pipeline, data_aug_conf=data_aug_conf, test_mode=True),
)
test_dataloader = val_dataloader

val_evaluator = [
    dict(type="NuScenesMetric", class_range=detection_range),
    dict(type="VectorMapMetric"),
]
test_evaluator = val_evaluator

data_preprocessor = dict(
    type="DrivingDataPreprocessor",
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
    bgr_to_rgb=True,
)
