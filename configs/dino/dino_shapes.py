# DINO on the shapes data set, from scratch in minutes on two CPU cores.
_base_ = ["../deformable_detr/deformable-detr_shapes.py"]

model = dict(
    type="DINO",
    backbone=dict(base_channels=24),
    neck=dict(in_channels=[48, 96, 192]),
    positional_encoding=dict(offset=0.0, temperature=20),
    bbox_head=dict(type="DINOHead", loss_cls=dict(loss_weight=4.0)),
    dn_cfg=dict(label_noise_scale=0.2, box_noise_scale=0.5, group_cfg=dict(dynamic=True, num_dn_queries=20)),
)

# An iteration with smaller images takes seven tenths of the time. The last ones see the images as they are.
train_dataloader = dict(
    dataset=dict(
        pipeline=[
            *_base_.train_pipeline[:-1],
            dict(type="Resize", scale=(96, 96), keep_ratio=False),
            _base_.train_pipeline[-1],
        ]
    )
)
custom_hooks = [dict(type="PipelineSwitchHook", switch_iter=440, switch_pipeline=_base_.train_pipeline)]
train_cfg = dict(max_iters=560, val_begin=190, val_interval=190)
# AdamW alone needs about twice as many iterations.
optim_wrapper = dict(
    optimizer=dict(type="MuonWithAuxAdam", lr=5e-3, momentum=0.9, ns_steps=4, weight_decay=1e-2)
)
