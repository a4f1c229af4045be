# Two-stage Deformable DETR, whose published weights are fine-tuned: `visdet train CONFIG --from
# deformable-detr-refine-twostage_r50_coco`. The rate is half of that of a training from the backbone's weights, grows
# during the first 100 iterations and is a tenth in the last three of 12 epochs. The backbone's is a tenth of it.
_base_ = ["./deformable-detr-refine-twostage_r50_16xb2-50e_coco.py"]

train_cfg = dict(max_epochs=12)
optim_wrapper = dict(optimizer=dict(lr=1e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type="MultiStepLR", begin=0, end=12, by_epoch=True, milestones=[9], gamma=0.1),
]
