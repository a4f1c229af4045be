# The small DINO of dino-small_coco.py with rotated boxes. The files are in COCO format, and each annotation has a
# segmentation of four points.
_base_ = ["../dino/dino-small_coco.py", "../_base_/models/rotated_boxes.py"]

train_dataloader = _base_.rotated_data
val_dataloader = _base_.rotated_data
test_dataloader = _base_.rotated_data
val_evaluator = _base_.rotated_metric
test_evaluator = _base_.rotated_metric
model = _base_.rotated_boxes
