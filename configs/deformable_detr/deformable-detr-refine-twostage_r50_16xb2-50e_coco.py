# Two-stage Deformable DETR with ResNet-50 and box refinement on COCO.
_base_ = "./deformable-detr_r50_16xb2-50e_coco.py"
model = dict(with_box_refine=True, as_two_stage=True)
