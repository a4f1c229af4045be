"""Boxes that are turned, as (cx, cy, w, h, angle) and as the polygons of their corners."""

import math

import cv2
import torch
from torch import Tensor

from visdet.errors import check_choice

# The least angle of each version, and the range of its angles. Only 'oc' leaves the least angle out.
ANGLE_VERSIONS = {
    "le90": (-math.pi / 2, math.pi),
    "le135": (-math.pi / 4, math.pi),
    "oc": (0.0, math.pi / 2),
}


def parts_of(boxes: Tensor) -> tuple[Tensor, ...]:  # [..., 5]
    """Return the centres (x, y) [..., 2], the sides (w, h) [..., 2] and the angles [..., 1] of turned boxes."""
    return boxes.split((2, 2, 1), -1)


def boxes_to_polygons(boxes: Tensor) -> Tensor:  # [..., 5]
    """Return the corners [..., 4, 2] (x, y) of turned boxes, in the order in which an upright box has them.

    An upright box has its top left, top right, bottom right and bottom left corner in this order, and the box is then
    turned about its centre. It is differentiable.

    Args:
        boxes: [..., 5] (cx, cy, w, h, angle). The centre and the sides are in pixels. The angle from the x axis to the
            side w is in radians, and turns clockwise in an image, whose y axis points down, as
            ``visdet.ops.box_iou_rotated`` takes it.
    """
    center, sides, angle = parts_of(boxes.unsqueeze(-2))
    corners = boxes.new_tensor([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])
    return center + turned(sides * corners, angle)


def turned(vectors: Tensor, angles: Tensor) -> Tensor:  # [..., 2], [..., 1]
    """Return vectors (x, y) [..., 2] that are turned by angles in radians, clockwise in an image."""
    x, y = vectors.split(1, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([x * cos - y * sin, x * sin + y * cos], -1)


def periodic(angles: Tensor) -> Tensor:  # [..., 1]
    """Return sin 2θ and cos 2θ [..., 2] of angles θ in radians, which are those of the box after half a turn."""
    double = 2 * angles
    return torch.cat([double.sin(), double.cos()], -1)


def polygons_to_boxes(polygons: Tensor, angle_version: str = "le90") -> Tensor:  # [N, K, 2]
    """Return the smallest turned boxes [N, 5] (cx, cy, w, h, angle) around polygons, float32 on the CPU.

    Args:
        polygons: [N, K, 2] (x, y) in pixels, in any order.
        angle_version: see :func:`regularized`.

    Raises:
        ValueError: ``angle_version`` is not known.

    Source: the boxes are those of OpenCV's ``minAreaRect``, with which mmrotate reads polygons.
    """
    boxes = torch.zeros(len(polygons), 5)
    for box, polygon in zip(boxes, polygons.cpu().float(), strict=True):
        center, sides, degrees = cv2.minAreaRect(polygon.numpy())
        box[:] = torch.tensor([*center, *sides, math.radians(degrees)])
    return regularized(boxes, angle_version)


def regularized(boxes: Tensor, angle_version: str = "le90") -> Tensor:  # [..., 5]
    """Return the same turned boxes [..., 5] with their angles in the range of a version.

    Args:
        boxes: [..., 5] (cx, cy, w, h, angle), see :func:`boxes_to_polygons`.
        angle_version: ``'le90'`` has w ≥ h and angles in [-π/2, π/2), ``'le135'`` w ≥ h and angles in [-π/4, 3π/4), and
            ``'oc'`` angles in (0, π/2].

    Raises:
        ValueError: ``angle_version`` is not known.

    Source: the names and ranges are mmrotate's.
    """
    check_choice("regularized: angle_version", angle_version, tuple(ANGLE_VERSIONS))
    least, period = ANGLE_VERSIONS[angle_version]
    center, width, height, angle = boxes.split((2, 1, 1, 1), -1)
    if angle_version == "oc":
        quarters = (angle / period).ceil() - 1
        is_swapped = quarters % 2 == 1
        # Rounding may leave the range.
        turned = (angle - quarters * period).clamp(torch.finfo(angle.dtype).tiny, period)
    else:
        is_swapped = width < height
        above = (torch.where(is_swapped, angle + math.pi / 2, angle) - least).remainder(period)
        # The remainder of a tiny negative number is rounded to the period.
        turned = least + torch.where(above >= period, 0.0, above)
    sides = [torch.where(is_swapped, height, width), torch.where(is_swapped, width, height)]
    return torch.cat([center, *sides, turned], -1)
