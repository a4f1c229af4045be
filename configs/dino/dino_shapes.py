# DINO on the shapes data set, from scratch in minutes on two CPU cores.
_base_ = ["../deformable_detr/deformable-detr_shapes.py"]

model = dict(
    type="DINO",
    positional_encoding=dict(offset=0.0, temperature=20),
    bbox_head=dict(type="DINOHead", loss_cls=dict(loss_weight=4.0)),
    dn_cfg=dict(label_noise_scale=0.5, box_noise_scale=1.0, group_cfg=dict(dynamic=True, num_dn_queries=20)),
)
optim_wrapper = dict(optimizer=dict(lr=2e-3))
train_cfg = dict(max_iters=1100, val_begin=400, val_interval=400)
