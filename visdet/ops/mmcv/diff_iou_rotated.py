"""Overlaps of rotated boxes that are differentiable with respect to the boxes."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._arguments import numbers_to
from .._declared import declared
from ..box_iou_rotated import corners_of, shared_area
from ..iou3d import from_above, shared_height

__all__ = ["diff_iou_rotated_2d", "diff_iou_rotated_3d", "sorted_vertices"]


def _shared_area(box1: Tensor, box2: Tensor) -> Tensor:
    """Return the area that boxes (x, y, w, h, angle) share, of each pair [B, N]."""
    center = F.pad(box1[..., :2].detach(), (0, 3))  # instead of the origin
    p, q = (corners_of((box - center).flatten(0, 1)) for box in (box1, box2))
    return shared_area(p, q, are_boxes=True).view(box1.shape[:2])


def _iou(box1: Tensor, box2: Tensor, shared: Tensor, sides: slice) -> Tensor:
    """Return the IoU of boxes in the plane or in space, given what they share and where their sides are."""
    sizes = [math.prod(box[..., sides].clamp(min=0).unbind(-1)) for box in (box1, box2)]
    is_number = box1.isfinite().all(-1) & box2.isfinite().all(-1)
    return (shared / (sizes[0] + sizes[1] - shared)).masked_fill(~is_number, torch.nan)


@declared(
    box1="floating [B, N, 5] (x, y, w, h, angle)",
    box2="floating [B, N, 5] (x, y, w, h, angle)",
)
def diff_iou_rotated_2d(box1: Tensor, box2: Tensor) -> Tensor:  # [B, N, 5] each -> [B, N]
    """Return the IoU of each rotated box of ``box1`` with that of the same place in ``box2``.

    Args:
        box1: [B, N, 5] (x, y, w, h, angle). The centres and sides, and the angles in radians, which turn from the x
            axis towards the y axis.
        box2: [B, N, 5]. Boxes of the same kind.

    Returns:
        [B, N]. The IoU in the type of ``box1``, computed in float64. A negative side counts as 0. If neither box has
        an area, or a number is NaN or infinite, it is NaN.

    It is differentiable with respect to both boxes. Where they do not overlap, the gradient is 0.

    Raises:
        ValueError: A shape, type or device does not fit. The message names the argument.

    Source: arXiv 1908.03851; the signature is mmcv's.
    """
    first, second = box1.double(), box2.double()
    return _iou(first, second, _shared_area(first, second), slice(2, 4)).to(box1)


@declared(
    box3d1="floating [B, N, 7] (x, y, z, w, h, l, angle)",
    box3d2="floating [B, N, 7] (x, y, z, w, h, l, angle)",
)
def diff_iou_rotated_3d(box3d1: Tensor, box3d2: Tensor) -> Tensor:  # [B, N, 7] each -> [B, N]
    """Return the IoU of each upright box in space of ``box3d1`` with that of the same place in ``box3d2``.

    Args:
        box3d1: [B, N, 7] (x, y, z, w, h, l, angle). The centres, the sides along x, y and z, and the angles around z in
            radians.
        box3d2: [B, N, 7]. Boxes of the same kind.

    Returns:
        [B, N]. The IoU in the type of ``box3d1``, computed in float64. A negative side counts as 0. If neither box has
        a volume, or a number is NaN or infinite, it is NaN.

    It is differentiable with respect to both boxes. Where they do not overlap, the gradient is 0.

    Raises:
        ValueError: A shape, type or device does not fit. The message names the argument.

    Source: arXiv 1908.03851; the signature is mmcv's.
    """
    first, second = box3d1.double(), box3d2.double()
    shared = _shared_area(from_above(first), from_above(second)) * shared_height(first, second)
    return _iou(first, second, shared, slice(3, 6)).to(box3d1)


@torch.no_grad()
def sorted_vertices(vertices: Tensor, mask: Tensor, num_valid: Tensor) -> Tensor:  # -> [B, N, 9] int32
    """Return the indices of the vertices of each polygon in order, the first one again behind the last.

    Args:
        vertices: [B, N, 24, 2]. Corners of two boxes (8) and points where their sides cross (16), from their mean.
        mask: [B, N, 24] bool. Whether a vertex is one of the polygon that the boxes share.
        num_valid: [B, N]. The number of vertices of each polygon.

    Returns:
        [B, N, 9] int32. Vertices from the x axis on, towards the y axis. Places without a vertex, and all places of a
        polygon of fewer than three vertices, have the index of a crossing that is none.

    A polygon has eight vertices at most. Where more are given, because some coincide, those closest to the one before
    are left out. mmcv's kernel leaves out others there, or writes behind its result.
    """
    angle = torch.atan2(vertices[..., 1], vertices[..., 0])
    angle = torch.where(angle < 0, angle + 2 * torch.pi, angle)
    order = torch.where(mask, angle, torch.inf).sort(dim=-1, stable=True)[1]  # the valid ones come first
    most = mask.shape[-1]
    count = num_valid.long().clamp(max=most)[..., None]
    rank = numbers_to(most, mask)
    ordered = vertices.take_along_dim(order[..., None], 2)
    # The last one is before the first.
    before = ordered.take_along_dim(((rank - 1) % count.clamp(min=1))[..., None], 2)
    gap = torch.where(rank < count, (ordered - before).square().sum(-1), -1.0)
    is_kept = gap.sort(dim=-1, descending=True, stable=True)[1].argsort(-1) < 8
    is_kept &= rank < count
    order = order.gather(2, (~is_kept).int().sort(dim=-1, stable=True)[1])[..., :9]
    count = is_kept.sum(-1, keepdim=True)
    crossing = 8 + (~mask[..., 8:]).int().argmax(-1, keepdim=True)
    place = rank[:9]
    result = torch.where(place == count, order[..., :1], torch.where(place < count, order, crossing))
    return torch.where(num_valid[..., None] < 3, crossing, result).int()
