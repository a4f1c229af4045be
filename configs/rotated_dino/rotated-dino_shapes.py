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
# Classes are learnt later than boxes here.
model["bbox_head"].update(
    loss_bbox=dict(**_base_.l1, loss_weight=2.5), loss_iou=dict(**_base_.distance, loss_weight=1.0)
)

custom_hooks = [dict(type="PipelineSwitchHook", switch_iter=540, switch_pipeline=_base_.train_pipeline)]
train_cfg = dict(max_iters=700, val_begin=350, val_interval=350)
