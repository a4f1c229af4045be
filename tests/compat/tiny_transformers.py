"""Small random models of the families of ``transformers`` that have multi-scale deformable attention."""

import importlib

import torch

from tests.fuzz.problem import generator_of

BATCH, CLASSES = 2, 5


def build(name):
    """Return a random model without symmetries, its inputs and its labels, the same at every call."""
    torch.manual_seed(0)
    package = importlib.import_module("transformers")
    prefix, kind, (height, width), config = MODELS[name]
    config = getattr(package, f"{prefix}Config")(**config(package))
    model = getattr(package, f"{prefix}{kind}")(config)
    generator = generator_of(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # of a size that keeps signals alive through all layers
            scale = 1.5 * parameter[0].numel() ** -0.5
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(module.weight)
    inputs = dict(pixel_values=torch.randn(BATCH, 3, height, width, generator=generator))
    if "grounding_dino" in name:
        ids = torch.tensor([[101, 37, 1012, 38, 1012, 102]] * BATCH)
        inputs |= dict(
            input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids)
        )
    if name == "oneformer":
        inputs |= dict(task_inputs=torch.randint(0, 99, (BATCH, 77), generator=generator))
    if name == "omdet_turbo":
        ids = torch.tensor([[1, 7, 98], [1, 9, 98]])
        inputs |= dict(classes_input_ids=ids.repeat(BATCH, 1), classes_structure=torch.tensor([2] * BATCH))
        inputs |= dict(tasks_input_ids=ids[:BATCH])
        inputs |= {
            f"{key}_attention_mask": torch.ones_like(inputs[f"{key}_input_ids"])
            for key in ("classes", "tasks")
        }
    if name in ("mask2former", "oneformer"):
        masks = [(torch.rand(2, height, width, generator=generator) > 0.5).float() for _ in range(BATCH)]
        labels = dict(mask_labels=masks, class_labels=[torch.tensor([1, 2])] * BATCH)
    else:
        boxes = torch.rand(3, 4, generator=generator) * 0.3 + 0.2
        labels = dict(labels=[dict(class_labels=torch.tensor([0, 1, 0]), boxes=boxes)] * BATCH)
    return model, inputs, labels


def stages(*numbers):
    return [f"stage{number}" for number in numbers]


RESNET = dict(
    embedding_size=8,
    hidden_sizes=[8, 12, 16, 24],
    depths=[1, 1, 1, 1],
    layer_type="basic",
    out_features=stages(2, 3, 4),
)
SWIN = dict(image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4)
HGNET = dict(
    stem_channels=[3, 8, 8],
    stage_in_channels=[8, 8, 12, 16],
    stage_mid_channels=[8, 8, 8, 8],
    stage_out_channels=[8, 12, 16, 24],
    stage_num_blocks=[1, 1, 1, 1],
    stage_downsample=[False, True, True, True],
    stage_light_block=[False, False, True, True],
    stage_kernel_size=[3, 3, 5, 5],
    stage_numb_of_layers=[1, 1, 1, 1],
    hidden_sizes=[8, 12, 16, 24],
    embedding_size=8,
)
HYBRID = dict(  # RT-DETR and what descends from it
    num_labels=CLASSES,
    encoder_hidden_dim=32,
    encoder_in_channels=[12, 16, 24],
    encoder_ffn_dim=16,
    encoder_attention_heads=2,
    d_model=32,
    num_queries=12,
    decoder_in_channels=[32, 32, 32],
    decoder_ffn_dim=16,
    decoder_layers=2,
    decoder_attention_heads=2,
    num_denoising=0,
)
DETR = dict(
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
    num_queries=12,
    dropout=0.0,
)
MASKS = dict(
    num_labels=CLASSES,
    hidden_dim=32,
    encoder_feedforward_dim=16,
    dim_feedforward=16,
    encoder_layers=2,
    decoder_layers=3,
    num_attention_heads=2,
    num_queries=7,
    train_num_points=50,
)
GROUPED = dict(  # LW-DETR and RF-DETR
    num_labels=CLASSES,
    d_model=32,
    decoder_ffn_dim=16,
    decoder_layers=2,
    decoder_self_attention_heads=2,
    decoder_cross_attention_heads=4,
    num_queries=12,
    group_detr=2,
    c2f_num_blocks=1,
    dropout=0.0,
)
VIT = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=64, out_indices=[1, 2])
NO_OTHER_BACKBONE = dict(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None)
WIDE = (64, 96)


def hgnet(package, *numbers):
    return package.HGNetV2Config(**HGNET, out_features=stages(*numbers))


def swin(package, *numbers):
    return package.SwinConfig(**SWIN, out_features=stages(*numbers))


def rt_detr(package):
    return dict(backbone_config=package.RTDetrResNetConfig(**RESNET), **HYBRID)


def ragged(package):
    return dict(backbone_config=hgnet(package, 2, 3, 4), decoder_n_points=[3, 6, 3], **HYBRID)


def grounding(package):
    text = package.BertConfig(
        vocab_size=2000,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    return dict(
        backbone_config=swin(package, 2, 3, 4),
        text_config=text,
        encoder_attention_heads=4,
        max_text_len=16,
        fusion_dropout=0.0,
        fusion_droppath=0.0,
        **DETR,
        **NO_OTHER_BACKBONE,
    )


# For each family, the prefix of its classes, its kind of model, the (height, width) of its images, and its config.
MODELS = {
    "deformable_detr": (
        *("DeformableDetr", "ForObjectDetection", (61, 83)),
        lambda t: dict(
            num_labels=CLASSES,
            backbone_config=t.ResNetConfig(**RESNET),
            encoder_attention_heads=2,
            **DETR,
            **NO_OTHER_BACKBONE,
        ),
    ),
    "rt_detr": ("RTDetr", "ForObjectDetection", WIDE, rt_detr),
    "rt_detr_v2": ("RTDetrV2", "ForObjectDetection", WIDE, rt_detr),
    "d_fine": ("DFine", "ForObjectDetection", WIDE, ragged),
    "deimv2": ("Deimv2", "ForObjectDetection", WIDE, ragged),
    "mask2former": (
        *("Mask2Former", "ForUniversalSegmentation", WIDE),
        lambda t: dict(
            backbone_config=swin(t, 1, 2, 3, 4),
            feature_size=32,
            mask_feature_size=32,
            feature_strides=[4, 8, 16, 32],
            **MASKS,
            **NO_OTHER_BACKBONE,
        ),
    ),
    "grounding_dino": ("GroundingDino", "ForObjectDetection", WIDE, grounding),
    "mm_grounding_dino": ("MMGroundingDino", "ForObjectDetection", WIDE, grounding),
    "pp_doclayout_v2": (
        *("PPDocLayoutV2", "Model", WIDE),
        lambda t: dict(backbone_config=hgnet(t, 2, 3, 4), **HYBRID),
    ),
    "pp_doclayout_v3": (
        *("PPDocLayoutV3", "Model", WIDE),
        lambda t: dict(backbone_config=hgnet(t, 1, 2, 3, 4), x4_feat_dim=8, **HYBRID),
    ),
    "pp_doclayout_v4": (
        *("PPDocLayoutV4", "Model", WIDE),
        lambda t: dict(backbone_config=hgnet(t, 2, 3, 4), **HYBRID),
    ),
    "lw_detr": (
        *("LwDetr", "ForObjectDetection", (64, 64)),
        lambda t: dict(
            backbone_config=t.LwDetrViTConfig(patch_size=8, pretrain_image_size=64, num_windows=4, **VIT),
            projector_scale_factors=[2.0, 0.5],
            **GROUPED,
        ),
    ),
    "rf_detr": (
        *("RfDetr", "ForObjectDetection", (64, 64)),
        lambda t: dict(backbone_config=t.RfDetrDinov2Config(patch_size=8, num_windows=2, **VIT), **GROUPED),
    ),
    "oneformer": (
        *("OneFormer", "ForUniversalSegmentation", WIDE),
        lambda t: dict(
            backbone_config=swin(t, 1, 2, 3, 4),
            conv_dim=32,
            mask_dim=32,
            query_dec_layers=1,
            text_encoder_width=32,
            text_encoder_num_layers=1,
            text_encoder_vocab_size=99,
            dropout=0.0,
            **MASKS,
        ),
    ),
    "omdet_turbo": (
        *("OmDetTurbo", "ForObjectDetection", (64, 64)),
        lambda t: dict(
            text_config=t.CLIPTextConfig(
                vocab_size=99,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                projection_dim=16,
                model_type="clip_text_model",
            ),
            backbone_config=swin(t, 2, 3, 4),
            apply_layernorm_after_vision_backbone=False,
            text_projection_in_dim=16,
            text_projection_out_dim=16,
            task_encoder_hidden_dim=16,
            class_embed_dim=16,
            num_queries=12,
            encoder_hidden_dim=32,
            vision_features_channels=[32, 32, 32],
            encoder_in_channels=[16, 32, 64],
            encoder_attention_heads=2,
            encoder_dim_feedforward=16,
            decoder_hidden_dim=32,
            decoder_num_heads=2,
            decoder_num_layers=2,
            decoder_dim_feedforward=16,
            image_size=64,
        ),
    ),
}
