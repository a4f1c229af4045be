# DINO with rotated boxes on shapes that are stretched and turned, from scratch in minutes on two CPU cores.
_base_ = ["../dino/dino_shapes.py", "../_base_/models/rotated_boxes.py"]

data_root = "data/rotated_shapes/"
classes = ("ellipse", "rectangle", "triangle", "star", "cross", "ring")
drawn = dict(dataset=dict(data_root=data_root, rotated=True, metainfo=dict(classes=classes)))
train_dataloader = drawn
val_dataloader = drawn
test_dataloader = drawn
val_evaluator = dict(**_base_.rotated_metric, ann_file=data_root + "annotations/instances_val.json")
test_evaluator = val_evaluator
model = _base_.rotated_boxes
model["bbox_head"]["loss_cls"] = dict(loss_weight=8.0)  # Classes are learnt later than boxes here.

# Thin shapes need the images as they are for longer than upright ones.
train_cfg = dict(max_iters=800, val_begin=400, val_interval=200)
