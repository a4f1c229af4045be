# nuScenes with tracks, futures and maps, and six cameras of 704 x 256 pixels. visdet prepare-nuscenes makes the info
# files (.npz). The published ones (.pkl) can be read, too. The augmentation is that of the published SparseDrive.
dataset_type = "NuScenes3DDetTrackDataset"
data_root = "data/nuscenes/"
info_root = "data/infos/"
class_names = [
    "car",
    "truck",
    "construction_vehicle",
    "bus",
    "trailer",
    "barrier",
    "motorcycle",
    "bicycle",
    "pedestrian",
    "traffic_cone",
]
map_class_names = ["ped_crossing", "divider", "boundary"]
roi_size = (30, 60)
depth_strides = [4, 8, 16]

train_pipeline = [
    dict(type="LoadMultiViewImageFromFiles", reduces=True),
    dict(type="LoadPointsFromFile", coord_type="LIDAR", load_dim=5, use_dim=3),
    dict(type="ResizeCropFlipImage"),
    dict(type="MultiScaleDepthMapGenerator", downsample=depth_strides),
    dict(type="BBoxRotation"),
    dict(type="PhotoMetricDistortionMultiViewImage"),
    dict(type="CircleObjectRangeFilter", class_dist_thred=[55] * len(class_names)),
    dict(type="InstanceNameFilter", classes=class_names),
    dict(type="VectorizeMap", roi_size=roi_size, normalize=False, sample_num=20, permute=True),
    dict(type="NuScenesSparse4DAdaptor"),
    dict(type="PackDrivingInputs"),
]
# The frames carry the ground truth, which the metrics read.
test_pipeline = [
    dict(type="LoadMultiViewImageFromFiles", reduces=True),
    dict(type="ResizeCropFlipImage"),
    dict(type="CircleObjectRangeFilter", class_dist_thred=[55] * len(class_names)),
    dict(type="InstanceNameFilter", classes=class_names),
    dict(type="VectorizeMap", roi_size=roi_size, normalize=False, simplify=True),
    dict(type="NuScenesSparse4DAdaptor"),
    dict(type="PackDrivingInputs"),
]

data_aug_conf = dict(
    resize_lim=(0.40, 0.47),
    final_dim=(256, 704),
    bot_pct_lim=(0.0, 0.0),
    rot_lim=(-5.4, 5.4),
    H=900,
    W=1600,
    rand_flip=True,
    rot3d_range=(0.0, 0.0),
)

# The batch sizes are for 8 GPUs with 8 frames each. Every slot plays one half scene after another.
train_dataloader = dict(
    batch_size=8,
    num_workers=8,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=False),
    batch_sampler=dict(type="GroupInBatchSampler"),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file=info_root + "nuscenes_infos_train.npz",
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
    num_workers=4,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type="SceneSampler"),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file=info_root + "nuscenes_infos_val.npz",
        classes=class_names,
        map_classes=map_class_names,
        pipeline=test_pipeline,
        data_aug_conf=data_aug_conf,
        test_mode=True,
    ),
)
test_dataloader = val_dataloader

val_evaluator = [
    dict(type="NuScenesMetric"),
    dict(type="VectorMapMetric"),
]
test_evaluator = val_evaluator

data_preprocessor = dict(
    type="DrivingDataPreprocessor",
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
    bgr_to_rgb=True,
)
