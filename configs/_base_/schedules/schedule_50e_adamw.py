# Deformable DETR's published schedule of 50 epochs with a total batch size of 32 images. From epoch 40 on, the learning
# rate is a tenth. For the backbone, the sampling offsets and the reference points, it is always a tenth of the others'.
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=50, val_interval=1)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=2e-4, weight_decay=1e-4, fused=True),
    clip_grad=dict(max_norm=0.1, norm_type=2),
    paramwise_cfg=dict(
        custom_keys={
            "backbone": dict(lr_mult=0.1),
            "sampling_offsets": dict(lr_mult=0.1),
            "reference_points": dict(lr_mult=0.1),
        }
    ),
)

param_scheduler = [dict(type="MultiStepLR", begin=0, end=50, by_epoch=True, milestones=[40], gamma=0.1)]

auto_scale_lr = dict(base_batch_size=32)
