# DINO, whose published weights are fine-tuned: `visdet train CONFIG --from dino-4scale_r50_coco`. The rate is half of
# that of a training from the weights of the backbone, grows during the first 100 iterations and is a tenth in the last
# two of 8 epochs. That of the backbone is a tenth of it.
_base_ = ["./dino-4scale_r50_8xb2-12e_coco.py"]

train_cfg = dict(max_epochs=8)
optim_wrapper = dict(optimizer=dict(lr=5e-5))
param_scheduler = [
    dict(type="LinearLR", start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type="MultiStepLR", begin=0, end=8, by_epoch=True, milestones=[6], gamma=0.1),
]
