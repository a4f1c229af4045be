"""Overlaps of rotated boxes and of quadrilaterals."""

from typing import Any

import torch
from torch import Tensor

from . import _registration
from ._arguments import check_that, common_constants, floating
from ._declared import declared

__all__ = ["box_iou_quadri", "box_iou_rotated", "box_iou_rotated_reference"]

MODES = ("iou", "iof", "area")


@declared(bboxes1="real [M, 5]", bboxes2="real [N, 5]", mode=f"one of {MODES}")
def box_iou_rotated(
    bboxes1: Tensor,  # [M, 5] (x, y, w, h, angle)
    bboxes2: Tensor,  # [N, 5]
    mode: str = "iou",
    aligned: bool = False,
    clockwise: bool = True,
) -> Tensor:  # [M, N], or [M] if aligned
    """Return the overlap of each rotated box of ``bboxes1`` with each of ``bboxes2``, or pair by pair.

    Args:
        bboxes1: [M, 5] (x, y, w, h, angle). The centre, the sides, and the angle of the side w with the x axis in
            radians. A negative side counts as 0.
        bboxes2: [N, 5]. Boxes of the same kind.
        mode: 'iou' divides the intersection by the union, 'iof' by the area of the box of ``bboxes1``. 'area' is the
            intersection itself.
        aligned: Whether each row is compared with the same row only. M must then equal N.
        clockwise: Whether angles turn from the x axis towards the y axis, which is clockwise in an image, whose y axis
            points down.

    Returns:
        [M, N], or [M] if aligned. The overlaps in the type of ``bboxes1``, or in float32 for integers. They are
        computed in float64 and rounded. That of a box without area is 0, and that of a box with a NaN or an infinite
        number is NaN.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape or ``mode`` does not fit. The message names the argument.

    Source: The signature is mmcv's, without the mode 'area'. mmcv computes in float32 and counts areas below 1e-14 as
    0.
    """
    return overlaps("box_iou_rotated", bboxes1, bboxes2, 5, mode, aligned, clockwise)


@declared(bboxes1="real [M, 8]", bboxes2="real [N, 8]", mode=f"one of {MODES}")
def box_iou_quadri(
    bboxes1: Tensor,  # [M, 8] (x1, y1, ..., x4, y4)
    bboxes2: Tensor,  # [N, 8]
    mode: str = "iou",
    aligned: bool = False,
) -> Tensor:  # [M, N], or [M] if aligned
    """Return the overlap of each quadrilateral of ``bboxes1`` with each of ``bboxes2``, or pair by pair.

    Args:
        bboxes1: [M, 8] (x1, y1, ..., x4, y4). The four corners in order, either way round. A quadrilateral may be
            concave, but the result for one that crosses itself has no meaning.
        bboxes2: [N, 8]. Quadrilaterals of the same kind.
        mode: As of ``box_iou_rotated``.
        aligned: As of ``box_iou_rotated``.

    Returns:
        [M, N], or [M] if aligned, as from ``box_iou_rotated``.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape or ``mode`` does not fit. The message names the argument.

    Source: The signature is mmcv's. mmcv finds corners inside of a quadrilateral as if that were a rectangle.
    """
    return overlaps("box_iou_quadri", bboxes1, bboxes2, 8, mode, aligned)


def overlaps(
    op: str, bboxes1: Tensor, bboxes2: Tensor, columns: int, mode: str, aligned: bool, clockwise: bool = True
) -> Tensor:
    """Return the overlaps of boxes with 5 or 8 columns, whose names are those of arguments of ``op``."""
    M, N = bboxes1.shape[0], bboxes2.shape[0]
    expected = "be [{}, {}] as bboxes1 where aligned"
    check_that(not aligned or M == N, op, "bboxes2", expected, bboxes2, M, columns)
    first, second = common_constants(bboxes1, bboxes2)
    if not clockwise:
        first, second = turned_back(first), turned_back(second)
    return _overlaps(first, second, MODES.index(mode), aligned).to(floating(bboxes1))


def turned_back(boxes: Tensor) -> Tensor:
    """Return rotated boxes or regions, whose last number is the angle, with angles of the opposite sign."""
    return torch.cat([boxes[:, :-1], -boxes[:, -1:]], 1)


def box_iou_rotated_reference(boxes1: Tensor, boxes2: Tensor, mode: int, is_aligned: bool) -> Tensor:
    """Return the overlaps of boxes [N, 5] or [N, 8] by plain torch; ``mode`` counts MODES."""
    p, q = (corners_of(boxes.double()) for boxes in (boxes1, boxes2))
    if not is_aligned:
        p, q = p[:, None], q[None]
    area1, area2 = polygon_area(p), polygon_area(q)
    shared = shared_area(p, q, are_boxes=boxes1.shape[1] == 5)
    shared = torch.minimum(shared, torch.minimum(area1, area2)).nan_to_num(0.0)
    whole = area1 if MODES[mode] == "iof" else area1 + area2 - shared
    result = shared if MODES[mode] == "area" else torch.where(shared > 0, shared / whole, 0.0)
    return torch.where((area1 + area2).isfinite(), result, torch.nan).to(boxes1)


def shared_area(p: Tensor, q: Tensor, are_boxes: bool) -> Tensor:
    """Return the area that polygons p [..., K, 2] share with quadrilaterals q [..., 4, 2], which may be boxes.

    The area is an integral around the polygon p (Green's theorem). A box q, or each of the two triangles of which a
    quadrilateral consists, is mapped to the unit square or triangle. Every edge of p adds the integral over v of how
    far that cell reaches to its left, max(u, 0) - max(u - width(v), 0). It is differentiable.
    """
    parts = [((1, 3), 0.0)] if are_boxes else [((1, 2), 1.0), ((2, 3), 1.0)]
    shared: Any = 0.0
    for (j, k), slant in parts:
        a, b, to_corner = q[..., j, :] - q[..., 0, :], q[..., k, :] - q[..., 0, :], p - q[..., :1, :]
        cross = cross_of(a, b)
        u, v = cross_of(to_corner, b[..., None, :]), cross_of(a[..., None, :], to_corner)
        u, v = (mapped / torch.where(cross == 0, 1.0, cross)[..., None] for mapped in (u, v))
        next_u, next_v = u.roll(-1, -1), v.roll(-1, -1)
        start, end = v.clamp(0, 1), next_v.clamp(0, 1)
        slope = (next_u - u) / torch.where(next_v == v, 1.0, next_v - v)
        u, next_u = u + slope * (start - v), next_u + slope * (end - next_v)
        reach = _positive_part(u, next_u)
        reach = reach - _positive_part(u - 1 + slant * start, next_u - 1 + slant * end)
        shared = shared + cross.abs() * ((end - start) * reach).sum(-1)
    return shared.abs()


def corners_of(boxes: Tensor) -> Tensor:
    """Return the corners [N, 4, 2] of boxes [N, 5] or [N, 8]."""
    if boxes.shape[1] == 8:
        return boxes.reshape(-1, 4, 2)
    center, sides, angle = boxes.split((2, 2, 1), 1)
    return center[:, None] + corners_from_center(sides.clamp(min=0), angle)


def corners_from_center(sides: Tensor, angle: Tensor) -> Tensor:
    """Return the corners [..., 4, 2] of boxes, from their centres, given their sides [..., 2] and angles [..., 1]."""
    half_w, half_h = (sides / 2).split(1, -1)
    cosine, sine = angle.cos(), angle.sin()
    along, across = torch.cat([cosine, sine], -1) * half_w, torch.cat([-sine, cosine], -1) * half_h
    return torch.stack([-along - across, along - across, along + across, across - along], -2)


def polygon_area(polygons: Tensor) -> Tensor:
    """Return the areas of polygons [..., K, 2] by the shoelace formula, NaN or infinite where a corner is."""
    corners = polygons - polygons[..., :1, :].detach()
    return cross_of(corners, corners.roll(-1, -2)).sum(-1).abs() / 2


def cross_of(a: Tensor, b: Tensor) -> Tensor:
    """Return the z component of the cross product of vectors [..., 2]."""
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def _positive_part(start: Tensor, end: Tensor) -> Tensor:
    """Return the integral from 0 to 1 of the positive part of a line from ``start`` to ``end``."""
    most, least = torch.maximum(start, end), torch.minimum(start, end)
    crossing = most.square() / (2 * torch.where(most == least, 1.0, most - least))
    return torch.where(most > 0, torch.where(least >= 0, (least + most) / 2, crossing), 0.0)


_overlaps = _registration.without_gradient(
    "box_iou_rotated",
    lambda given: given.boxes1.new_empty(
        given.boxes1.shape[0], *(() if given.is_aligned else given.boxes2.shape[:1])
    ),
    box_iou_rotated_reference,
    boxes1="[M, D]",
    boxes2="[N, D]",
)
