# The small detector of deformable-detr_shapes.py on data in COCO format, trained from scratch. It needs neither a GPU
# nor pretrained weights. Images are scaled to fit into 320 x 320 pixels. Every second one is joined with three others,
# and colours change, which makes more of few images.
# For your own data, set data_root, ann_file, data_prefix and metainfo=dict(classes=(...)) in all three data sets,
# ann_file in the evaluators, and num_classes in the model.
_base_ = ["./deformable-detr_shapes.py"]

data_root = "data/coco/"
resize = dict(type="Resize", scale=(320, 320), keep_ratio=True)
read = [
    dict(type="LoadImageFromFile", channel_order="rgb"),
    dict(type="LoadAnnotations", with_bbox=True),
]
train_pipeline = [
    *read,
    dict(type="Mosaic", size=(320, 320), prob=0.5),
    resize,
    dict(type="RandomFlip", prob=0.5),
    dict(
        type="TorchvisionTransform",
        transform="ColorJitter",
        **dict(brightness=0.3, contrast=0.3, saturation=0.3, hue=0.05),
    ),
    dict(type="PackDetInputs"),
]
test_pipeline = [read[0], resize, read[1], dict(type="PackDetInputs")]

train_dataloader = dict(
    batch_size=8,
    dataset=dict(
        type="CocoDataset",
        data_root=data_root,
        ann_file="annotations/instances_train2017.json",
        data_prefix=dict(img="train2017/"),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    dataset=dict(
        type="CocoDataset",
        data_root=data_root,
        ann_file="annotations/instances_val2017.json",
        data_prefix=dict(img="val2017/"),
        pipeline=test_pipeline,
    )
)
test_dataloader = val_dataloader

val_evaluator = dict(ann_file=data_root + "annotations/instances_val2017.json")
test_evaluator = val_evaluator

model = dict(bbox_head=dict(num_classes=80))
train_cfg = dict(max_iters=1400, val_begin=100, val_interval=100)
