# A small DINO for photographs in COCO format, trained from scratch: what `visdet train --data FOLDER` takes. It needs
# neither a GPU nor pretrained weights. Images are scaled to fit into 480 x 480 pixels, and colours change. A Mosaic
# would have most of the boxes, at half their size, so that a short run would learn sizes that validation lacks.
# For your own data, set data_root, ann_file, data_prefix and metainfo=dict(classes=(...)) in all three data sets,
# ann_file in the evaluators, and num_classes in the model.
_base_ = ["../deformable_detr/deformable-detr_small_coco.py"]

resize = dict(type="Resize", scale=(480, 480), keep_ratio=True)
train_pipeline = [*_base_.read, resize, *_base_.train_pipeline[4:]]
test_pipeline = [_base_.read[0], resize, _base_.read[1], dict(type="PackDetInputs")]
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

model = dict(
    type="DINO",
    num_queries=100,
    only_usable_proposals=True,
    backbone=dict(base_channels=24),
    neck=dict(in_channels=[48, 96, 192]),
    positional_encoding=dict(offset=0.0, temperature=20),
    bbox_head=dict(type="DINOHead", num_classes=80, loss_cls=dict(loss_weight=4.0)),
    dn_cfg=dict(label_noise_scale=0.2, box_noise_scale=0.5, group_cfg=dict(dynamic=True, num_dn_queries=20)),
)
# AdamW alone needs about twice as many iterations.
optim_wrapper = dict(
    optimizer=dict(type="MuonWithAuxAdam", lr=5e-3, momentum=0.9, ns_steps=4, weight_decay=1e-2)
)
train_cfg = dict(max_iters=700, val_begin=20, val_interval=100)
