"""Small random models of the families of ``transformers`` that have multi-scale deformable attention."""

from typing import Any

import torch

MODELS: dict[str, Any] = {}
BATCH, CLASSES = 2, 5


def family(name):
    """Register a function that returns a model and the (height, width) of its images."""

    def register(build):
        MODELS[name] = build
        return build

    return register


def build(name):
    """Return a random model without symmetries, its inputs and its labels, the same at every call."""
    torch.manual_seed(0)
    model, (height, width) = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
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


def resnet(*stages):
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 12, 16, 24],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=[f"stage{stage}" for stage in stages],
    )


def swin(*stages):
    from transformers import SwinConfig

    return SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=[f"stage{stage}" for stage in stages],
    )


def rt_detr_backbone():
    from transformers import RTDetrResNetConfig

    return RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 12, 16, 24],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )


def hgnet(*stages):
    from transformers import HGNetV2Config

    return HGNetV2Config(
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
        out_features=[f"stage{stage}" for stage in stages or (2, 3, 4)],
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


@family("deformable_detr")
def _deformable_detr(**extra):
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection

    config = DeformableDetrConfig(
        num_labels=CLASSES,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=resnet(2, 3, 4),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=12,
        dropout=0.0,
        **extra,
    )
    return DeformableDetrForObjectDetection(config), (61, 83)


@family("rt_detr")
def _rt_detr():
    from transformers import RTDetrConfig, RTDetrForObjectDetection

    config = RTDetrConfig(backbone_config=rt_detr_backbone(), **HYBRID)
    return RTDetrForObjectDetection(config), (64, 96)


@family("rt_detr_v2")
def _rt_detr_v2(**extra):
    from transformers import RTDetrV2Config, RTDetrV2ForObjectDetection

    config = RTDetrV2Config(backbone_config=rt_detr_backbone(), **HYBRID, **extra)
    return RTDetrV2ForObjectDetection(config), (64, 96)


@family("d_fine")
def _d_fine(**extra):
    from transformers import DFineConfig, DFineForObjectDetection

    extra = dict(decoder_n_points=[3, 6, 3]) | extra
    config = DFineConfig(backbone_config=hgnet(), **HYBRID, **extra)
    return DFineForObjectDetection(config), (64, 96)


@family("mask2former")
def _mask2former():
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

    config = Mask2FormerConfig(
        num_labels=CLASSES,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=swin(1, 2, 3, 4),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=2,
        decoder_layers=3,
        num_attention_heads=2,
        num_queries=7,
        train_num_points=50,
        feature_strides=[4, 8, 16, 32],
    )
    return Mask2FormerForUniversalSegmentation(config), (64, 96)


def _grounding(prefix):
    import transformers

    config = getattr(transformers, f"{prefix}Config")(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=swin(2, 3, 4),
        text_config=transformers.BertConfig(
            vocab_size=2000,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=32,
        ),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=12,
        max_text_len=16,
        dropout=0.0,
        fusion_dropout=0.0,
        fusion_droppath=0.0,
    )
    return getattr(transformers, f"{prefix}ForObjectDetection")(config), (64, 96)


@family("grounding_dino")
def _grounding_dino():
    return _grounding("GroundingDino")


@family("mm_grounding_dino")
def _mm_grounding_dino():
    return _grounding("MMGroundingDino")


@family("deimv2")
def _deimv2():
    from transformers import Deimv2Config, Deimv2ForObjectDetection

    config = Deimv2Config(backbone_config=hgnet(), decoder_n_points=[3, 6, 3], **HYBRID)
    return Deimv2ForObjectDetection(config), (64, 96)


def _doclayout(prefix, *stages, **extra):
    import transformers

    config = getattr(transformers, f"{prefix}Config")(backbone_config=hgnet(*stages), **HYBRID, **extra)
    return getattr(transformers, f"{prefix}Model")(config), (64, 96)


@family("pp_doclayout_v2")
def _pp_doclayout_v2():
    return _doclayout("PPDocLayoutV2")


@family("pp_doclayout_v3")
def _pp_doclayout_v3():
    return _doclayout("PPDocLayoutV3", 1, 2, 3, 4, x4_feat_dim=8)


@family("pp_doclayout_v4")
def _pp_doclayout_v4():
    return _doclayout("PPDocLayoutV4")


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


@family("lw_detr")
def _lw_detr():
    from transformers import LwDetrConfig, LwDetrForObjectDetection, LwDetrViTConfig

    backbone = LwDetrViTConfig(patch_size=8, pretrain_image_size=64, num_windows=4, **VIT)
    config = LwDetrConfig(backbone_config=backbone, projector_scale_factors=[2.0, 0.5], **GROUPED)
    return LwDetrForObjectDetection(config), (64, 64)


@family("rf_detr")
def _rf_detr():
    from transformers import RfDetrConfig, RfDetrDinov2Config, RfDetrForObjectDetection

    backbone = RfDetrDinov2Config(patch_size=8, num_windows=2, **VIT)
    return RfDetrForObjectDetection(RfDetrConfig(backbone_config=backbone, **GROUPED)), (64, 64)


@family("oneformer")
def _oneformer():
    from transformers import OneFormerConfig, OneFormerForUniversalSegmentation

    config = OneFormerConfig(
        num_labels=CLASSES,
        backbone_config=swin(1, 2, 3, 4),
        conv_dim=32,
        mask_dim=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=2,
        decoder_layers=3,
        query_dec_layers=1,
        num_attention_heads=2,
        num_queries=7,
        train_num_points=50,
        text_encoder_width=32,
        text_encoder_num_layers=1,
        text_encoder_vocab_size=99,
        dropout=0.0,
    )
    return OneFormerForUniversalSegmentation(config), (64, 96)


@family("omdet_turbo")
def _omdet_turbo():
    from transformers import CLIPTextConfig, OmDetTurboConfig, OmDetTurboForObjectDetection

    text = CLIPTextConfig(
        vocab_size=99,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        projection_dim=16,
        model_type="clip_text_model",
    )
    config = OmDetTurboConfig(
        text_config=text,
        backbone_config=swin(2, 3, 4),
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
    )
    return OmDetTurboForObjectDetection(config), (64, 64)
