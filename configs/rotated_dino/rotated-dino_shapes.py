# DINO with rotated boxes on shapes that are stretched and turned, from scratch in minutes on two CPU cores.
_base_ = ["../dino/dino_shapes.py", "../_base_/models/rotated_boxes.py"]

data_root = "data/rotated_shapes/"
drawn = dict(dataset=dict(data_root=data_root, rotated=True))
train_dataloader = drawn
val_dataloader = drawn
test_dataloader = drawn
val_evaluator = dict(**_base_.rotated_metric, ann_file=data_root + "annotations/instances_val.json")
test_evaluator = val_evaluator
model = _base_.rotated_boxes
