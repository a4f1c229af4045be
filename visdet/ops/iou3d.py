"""Overlaps and suppression of 3-D boxes, seen from above (bird's eye view) or as volumes."""

import torch
from torch import Tensor

from ._arguments import constant, exact, floating
from ._declared import declared
from .box_iou_rotated import overlaps
from .nms import kept_indices

__all__ = ["boxes_iou3d", "boxes_overlap_bev", "nms3d", "nms3d_normal"]


@declared(boxes_a="real [M, 7]", boxes_b="real [N, 7]")
def boxes_overlap_bev(
    boxes_a: Tensor,  # [M, 7] (x, y, z, dx, dy, dz, heading)
    boxes_b: Tensor,  # [N, 7]
) -> Tensor:  # [M, N]
    """Return the area that each box of ``boxes_a`` and each of ``boxes_b`` share, seen from above.

    Args:
        boxes_a: [M, 7] (x, y, z, dx, dy, dz, heading). The centre and the sides in metres, and the angle of the side dx
            with the x axis, towards the y axis, in radians.
        boxes_b: [N, 7]. Boxes of the same kind.

    Returns:
        [M, N]. The areas in the unit of the boxes, squared. They are computed in float64 and rounded. Those of a box
        with a NaN or an infinite number (z and dz apart) are NaN.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    return overlaps("boxes_overlap_bev", from_above(boxes_a), from_above(boxes_b), 5, "area", False)


@declared(boxes_a="real [M, 7]", boxes_b="real [N, 7]")
def boxes_iou3d(
    boxes_a: Tensor,  # [M, 7] (x, y, z, dx, dy, dz, heading)
    boxes_b: Tensor,  # [N, 7]
) -> Tensor:  # [M, N]
    """Return the IoU of volumes for each pair of a box of ``boxes_a`` and a box of ``boxes_b``.

    Args:
        boxes_a: [M, 7]. As of ``boxes_overlap_bev``, with z the height of the centre.
        boxes_b: [N, 7]. Boxes of the same kind.

    Returns:
        [M, N]. The overlaps in the type of ``boxes_a``, or in float32 for integers. That of a box without volume is 0,
        and that of a box with a NaN or an infinite number is NaN.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    a, b = exact(boxes_a), exact(boxes_b)
    shared = boxes_overlap_bev(a, b) * shared_height(a[:, None], b)
    volume_a, volume_b = (boxes[:, 3:6].clamp(min=0).prod(1) for boxes in (a, b))
    union = volume_a[:, None] + volume_b - shared
    is_number = a.isfinite().all(1)[:, None] & b.isfinite().all(1)
    iou = torch.where(shared == 0, 0.0, shared / union).masked_fill(~is_number, torch.nan)
    return iou.to(floating(boxes_a))


@declared(boxes="real [N, 7]", scores="real [N]", iou_threshold="number")
def nms3d(
    boxes: Tensor,  # [N, 7] (x, y, z, dx, dy, dz, heading)
    scores: Tensor,  # [N]
    iou_threshold: float,
) -> Tensor:  # [M] int64
    """Return the indices of the boxes that no better one overlaps, seen from above, by more than ``iou_threshold``.

    Args:
        boxes: [N, 7]. As of ``boxes_overlap_bev``. z and dz do not count.
        scores: [N]. The score of each box. Of equal scores the lower index comes first. NaN scores come first.
        iou_threshold: A box is suppressed if its IoU with a kept one is greater.

    Returns:
        [M]. The indices, best score first. A box with a NaN or infinite number suppresses no other and is kept.

    It is not differentiable. It is deterministic. On a GPU, the host waits once, for the number of boxes.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    return kept_indices(from_above(boxes), scores, iou_threshold)


@declared(boxes="real [N, 7]", scores="real [N]", iou_threshold="number")
def nms3d_normal(
    boxes: Tensor,  # [N, 7] (x, y, z, dx, dy, dz, heading)
    scores: Tensor,  # [N]
    iou_threshold: float,
) -> Tensor:  # [M] int64
    """Return what ``nms3d`` returns of the boxes with a heading of 0.

    Args:
        boxes: [N, 7]. As of ``nms3d``. The heading does not count.
        scores: [N]. As of ``nms3d``.
        iou_threshold: As of ``nms3d``.

    Returns:
        [M]. As from ``nms3d``. The overlaps are computed in the type of the boxes, those of 16 bits in float32.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    wide = constant(boxes, boxes)
    half = wide[:, 3:5] / 2
    return kept_indices(torch.cat([wide[:, :2] - half, wide[:, :2] + half], 1), scores, iou_threshold)


def from_above(boxes: Tensor) -> Tensor:
    """Return (x, y, dx, dy, heading) of boxes [..., 7]."""
    return torch.cat([boxes[..., :2], boxes[..., 3:5], boxes[..., 6:]], -1)


def shared_height(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """Return the lengths along z [...] that boxes [..., 7] have in common."""
    (z_a, half_a), (z_b, half_b) = ((boxes[..., 2], boxes[..., 5] / 2) for boxes in (boxes_a, boxes_b))
    top, bottom = torch.minimum(z_a + half_a, z_b + half_b), torch.maximum(z_a - half_a, z_b - half_b)
    return (top - bottom).clamp(min=0)
