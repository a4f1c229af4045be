# The shapes data set has 4000 + 400 images of 128 x 128 pixels with six classes, drawn into data_root at the first use.
dataset_type = "ShapesDataset"
data_root = "data/shapes/"

train_pipeline = [
    dict(type="LoadImageFromFile", channel_order="rgb"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile", channel_order="rgb"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs"),
]

# Reading an image takes 0.5 ms. On two cores, a worker process would slow the model (0.18 s per iteration without one,
# 0.21 s with one).
train_dataloader = dict(
    batch_size=16,
    num_workers=0,
    sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file="annotations/instances_train.json",
        data_prefix=dict(img="train/"),
        filter_cfg=dict(filter_empty_gt=False),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=16,
    num_workers=0,
    drop_last=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file="annotations/instances_val.json",
        data_prefix=dict(img="val/"),
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader

val_evaluator = dict(
    type="CocoMetric",
    ann_file=data_root + "annotations/instances_val.json",
    metric="bbox",
)
test_evaluator = val_evaluator
