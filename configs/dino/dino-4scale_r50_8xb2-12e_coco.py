# DINO's published model and schedule of 12 epochs with a total batch size of 16 images. It says what differs from
# Deformable DETR. From epoch 11 on, the learning rate is a tenth. For the backbone, it is always a tenth.
_base_ = ["../deformable_detr/deformable-detr_r50_16xb2-50e_coco.py"]

feed_forward = dict(feedforward_channels=2048, ffn_drop=0.0)
model = dict(
    type="DINO",
    num_queries=900,
    with_box_refine=True,
    as_two_stage=True,
    encoder=dict(layer_cfg=dict(self_attn_cfg=dict(num_levels=4, dropout=0.0), ffn_cfg=feed_forward)),
    decoder=dict(
        layer_cfg=dict(
            self_attn_cfg=dict(dropout=0.0),
            cross_attn_cfg=dict(num_levels=4, dropout=0.0),
            ffn_cfg=feed_forward,
        )
    ),
    positional_encoding=dict(offset=0.0, temperature=20),
    bbox_head=dict(type="DINOHead", loss_cls=dict(loss_weight=1.0)),
    dn_cfg=dict(
        label_noise_scale=0.5,
        box_noise_scale=1.0,
        group_cfg=dict(dynamic=True, num_groups=None, num_dn_queries=100),
    ),
    test_cfg=dict(max_per_img=300),
)

train_cfg = dict(max_epochs=12)
optim_wrapper = dict(
    optimizer=dict(lr=1e-4),
    paramwise_cfg=dict(custom_keys=dict(_delete_=True, backbone=dict(lr_mult=0.1))),
)
param_scheduler = [dict(type="MultiStepLR", begin=0, end=12, by_epoch=True, milestones=[11], gamma=0.1)]
auto_scale_lr = dict(base_batch_size=16)
