# DINO with rotated boxes on DOTA 1.0, of which each image is a tile of about 1024 x 1024 pixels. `visdet convert` makes
# the files in COCO format of DOTA's text files.
_base_ = ["../dino/dino-4scale_r50_8xb2-12e_coco.py", "../_base_/models/rotated_boxes.py"]

data_root = "data/dota/"
metainfo = dict(
    classes=(
        "plane",
        "baseball-diamond",
        "bridge",
        "ground-track-field",
        "small-vehicle",
        "large-vehicle",
        "ship",
        "tennis-court",
        "basketball-court",
        "storage-tank",
        "soccer-ball-field",
        "roundabout",
        "harbor",
        "swimming-pool",
        "helicopter",
    )
)
resize = dict(type="Resize", scale=(1024, 1024), keep_ratio=True)
train_pipeline = [
    *_base_.train_pipeline[:2],
    resize,
    dict(type="RandomFlip", prob=0.75, direction=["horizontal", "vertical", "diagonal"]),
    dict(type="PackDetInputs"),
]
test_pipeline = [_base_.test_pipeline[0], resize, *_base_.test_pipeline[2:]]
images = dict(data_root=data_root, metainfo=metainfo, **_base_.rotated_data["dataset"])
train_dataloader = dict(
    dataset=dict(
        **images, ann_file="train.json", data_prefix=dict(img="train/images/"), pipeline=train_pipeline
    )
)
val_dataloader = dict(
    dataset=dict(**images, ann_file="val.json", data_prefix=dict(img="val/images/"), pipeline=test_pipeline)
)
test_dataloader = val_dataloader
val_evaluator = dict(**_base_.rotated_metric, ann_file=data_root + "val.json")
test_evaluator = val_evaluator

model = dict(**_base_.rotated_boxes, num_queries=900, test_cfg=dict(max_per_img=500))
model["bbox_head"]["num_classes"] = len(metainfo["classes"])
