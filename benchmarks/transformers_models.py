"""Detectors of ``transformers`` with their published sizes, random weights, random images and random labels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .case import seeded

CLASSES = 80
OBJECTS = 8  # number of objects in an image
REAL_TIME = (640, 640)
COCO = (800, 1066)
LOCAL = dict(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None)  # avoids downloads
TEXT = (101, 4937, 1012, 3899, 1012, 102)  # BERT's tokens for "cat . dog ."


@dataclass(frozen=True)
class Family:
    """One family, which is a class of ``transformers`` and its configuration.

    Attributes:
        name: the name of the family. model: the name of the class.
        config: the function that returns the configuration, given the package.
        size: the (height, width) of the images.
        labels: "boxes" or "masks".
        compared: the outputs by which stock and visdet are compared.
        has_text: whether a sentence is an input.
    """

    name: str
    model: str
    config: Callable[[Any], Any]
    size: tuple[int, int] = REAL_TIME
    labels: str = "boxes"
    compared: tuple[str, ...] = ("logits", "pred_boxes")
    has_text: bool = False


@dataclass(frozen=True)
class Inputs:
    """Keyword arguments of a model: those of a prediction, and the additional labels of a training step."""

    images: dict[str, Tensor]
    labels: dict[str, Any]


def _swin(package: Any, **out: Any) -> Any:
    return package.SwinConfig(
        embed_dim=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], window_size=7, **out
    )


def _deformable_detr(package: Any) -> Any:
    backbone = package.ResNetConfig(out_features=["stage2", "stage3", "stage4"])
    return package.DeformableDetrConfig(num_labels=CLASSES, backbone_config=backbone, **LOCAL)


def _grounding_dino(package: Any) -> Any:
    return package.GroundingDinoConfig(backbone_config=_swin(package, out_indices=[2, 3, 4]), **LOCAL)


def _mask2former(package: Any) -> Any:
    stages = [f"stage{number}" for number in range(1, 5)]
    return package.Mask2FormerConfig(
        num_labels=CLASSES, backbone_config=_swin(package, out_features=stages), **LOCAL
    )


def _lw_detr(package: Any) -> Any:
    # The default configuration has no level at all. The published models up to "medium" have one, with stride 16.
    return package.LwDetrConfig(num_labels=CLASSES, projector_scale_factors=[1.0])


def _by_default(prefix: str) -> dict[str, Any]:
    """Return the model and the configuration of a family whose default configuration is the published one."""
    return dict(
        model=f"{prefix}ForObjectDetection",
        config=lambda package: getattr(package, f"{prefix}Config")(num_labels=CLASSES),
    )


FAMILIES = {
    family.name: family
    for family in (
        Family("deformable_detr", "DeformableDetrForObjectDetection", _deformable_detr, COCO),
        Family("grounding_dino", "GroundingDinoForObjectDetection", _grounding_dino, COCO, has_text=True),
        Family(
            "mask2former",
            "Mask2FormerForUniversalSegmentation",
            _mask2former,
            COCO,
            labels="masks",
            # Its decoder attends where a mask is above a threshold, and rounding may move a pixel across it.
            compared=("pixel_decoder_last_hidden_state",),
        ),
        Family("rt_detr", **_by_default("RTDetr")),
        Family("rt_detr_v2", **_by_default("RTDetrV2")),
        Family("d_fine", **_by_default("DFine")),
        Family("lw_detr", "LwDetrForObjectDetection", _lw_detr),
        Family("rf_detr", **_by_default("RfDetr"), size=(560, 560)),  # 40 patches, a multiple of its windows
    )
}


def make_model(family: Family, device: torch.device) -> nn.Module:
    """Return a model with the same random weights at every call. They are drawn on its device if possible."""
    import transformers

    torch.manual_seed(0)
    with device:
        model = getattr(transformers, family.model)(family.config(transformers))
    return model.to(device)


def make_inputs(family: Family, batch: int, device: torch.device) -> Inputs:
    """Return random images and labels, which are the same at every call."""
    draw = seeded(1)
    images = dict(pixel_values=torch.randn(batch, 3, *family.size, generator=draw))
    if family.has_text:
        ids = torch.tensor([TEXT] * batch)
        images |= dict(
            input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids)
        )
    classes = [
        torch.randint(0, 2 if family.has_text else CLASSES, (OBJECTS,), generator=draw) for _ in range(batch)
    ]
    if family.labels == "masks":
        masks = [(torch.rand(OBJECTS, *family.size, generator=draw) > 0.5).float() for _ in range(batch)]
        labels: dict[str, Any] = dict(
            mask_labels=[mask.to(device) for mask in masks], class_labels=[c.to(device) for c in classes]
        )
    else:
        boxes = [torch.rand(OBJECTS, 4, generator=draw) * 0.4 + 0.1 for _ in range(batch)]
        pairs = zip(classes, boxes, strict=True)
        labels = dict(labels=[dict(class_labels=c.to(device), boxes=b.to(device)) for c, b in pairs])
    return Inputs({name: tensor.to(device) for name, tensor in images.items()}, labels)
