# DINO on five levels of Swin-L, which was pretrained on ImageNet-22k.
_base_ = ["./dino-5scale_r50_8xb2-12e_coco.py"]

pretrained = "https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_large_patch4_window12_384_22k.pth"
model = dict(
    backbone=dict(
        _delete_=True,
        type="SwinTransformer",
        pretrain_img_size=384,
        embed_dims=192,
        depths=[2, 2, 18, 2],
        num_heads=[6, 12, 24, 48],
        window_size=12,
        drop_path_rate=0.2,
        out_indices=(0, 1, 2, 3),
        with_cp=True,
        convert_weights=True,
        init_cfg=dict(type="Pretrained", checkpoint=pretrained),
    ),
    neck=dict(in_channels=[192, 384, 768, 1536]),
)
# Swin's windows see the padding, so that each image is evaluated in its own size.
val_dataloader = dict(batch_sampler=None)
test_dataloader = val_dataloader
