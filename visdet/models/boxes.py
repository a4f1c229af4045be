"""Axis-aligned boxes: conversions between their layouts, and overlaps."""

import torch
from torch import Tensor

from visdet.errors import check_choice


def cxcywh_to_xyxy(boxes_cxcywh: Tensor) -> Tensor:
    """Return the corners (x1, y1, x2, y2) [..., 4] of boxes given by centre and size (cx, cy, w, h) [..., 4]."""
    centers, sizes = boxes_cxcywh.split(2, dim=-1)
    half = sizes * 0.5
    return torch.cat((centers - half, centers + half), dim=-1)


def xyxy_to_cxcywh(boxes_xyxy: Tensor) -> Tensor:
    """Return centre and size (cx, cy, w, h) [..., 4] of boxes given by their corners (x1, y1, x2, y2) [..., 4]."""
    low, high = boxes_xyxy.split(2, dim=-1)
    return torch.cat(((low + high) * 0.5, high - low), dim=-1)


def diagonals(sides: Tensor) -> Tensor:
    """Return the lengths [...] of vectors or diagonals [..., 2].

    ``torch.norm`` becomes a ReduceL2, which OpenVINO joins with its neighbours into an operator with other results.
    """
    width, height = sides.unbind(-1)
    return (width.square() + height.square()).sqrt()


def inverse_sigmoid(x: Tensor, eps: float) -> Tensor:
    """Return log(max(x, eps) / max(1 - x, eps)) for x clamped to 0..1.

    It is mmdet's function, and differs from ``torch.logit(x, eps)`` by up to ``eps`` where it clamps.
    """
    x = x.clamp(min=0, max=1)
    return (x.clamp(min=eps) / (1 - x).clamp(min=eps)).log()


def elementwise_overlaps(boxes_a: Tensor, boxes_b: Tensor, mode: str = "iou", eps: float = 1e-6) -> Tensor:
    """Return IoU in [0, 1] or generalised IoU in [-1, 1] of broadcast boxes (x1, y1, x2, y2).

    IoU = |A ∩ B| / |A ∪ B|;  GIoU = IoU - |hull \\ (A ∪ B)| / |hull|, with hull the smallest box around both.
    For all pairs pass ``boxes_a[..., :, None, :]`` and ``boxes_b[..., None, :, :]``.

    Args:
        boxes_a: [..., 4], any unit.
        boxes_b: [..., 4], broadcast against ``boxes_a``, same unit.
        mode: ``'iou'`` or ``'giou'``.
        eps: the least value of a denominator, in the square of the boxes' unit. Two boxes without area have IoU 0.

    Returns:
        [...], the broadcast shape. The result is differentiable. NaN coordinates give NaN.

    Raises:
        ValueError: the mode is unknown.

    Source: Rezatofighi et al., Generalized Intersection over Union, CVPR 2019.
    """
    check_choice("elementwise_overlaps: mode", mode, ("iou", "giou"))
    low_a, high_a = boxes_a.split(2, dim=-1)
    low_b, high_b = boxes_b.split(2, dim=-1)
    intersection = area_of((torch.minimum(high_a, high_b) - torch.maximum(low_a, low_b)).clamp(min=0))
    union = area_of(high_a - low_a) + area_of(high_b - low_b) - intersection
    union = union.clamp(min=eps)
    iou = intersection / union
    if mode == "iou":
        return iou
    hull = area_of((torch.maximum(high_a, high_b) - torch.minimum(low_a, low_b)).clamp(min=0)).clamp(min=eps)
    return iou - (hull - union) / hull


def area_of(sides: Tensor) -> Tensor:
    """Return width · height of sides [..., 2]. ``torch.prod`` is avoided, because its gradient waits for the device."""
    width, height = sides.unbind(-1)
    return width * height
