"""Boxes (x, y, z, dx, dy, dz, heading), and their overlaps in plain Python."""

import math

import torch
from torch import Tensor

from tests.fuzz.polygons import IS_NAN, area, rectangle, shared
from tests.fuzz.problem import EXTREME, Draw

__all__ = ["FLAT", "boxes_in_space", "overlap", "turned"]


FLAT = (0, 1, 3, 4, 6)


def turned(draw: Draw, center: Tensor, sides: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return centres, sides and random angles [..., 1], in some problems whole ones and eighths of a turn."""
    angle = draw.uniform(-7, 7, *center.shape[:-1], 1)
    if draw.chance(0.3):
        center, sides, angle = center.round(), sides.ceil(), (angle * 2).round() * math.pi / 4
    return center, sides, angle


def boxes_in_space(draw: Draw, *shape: int, is_flat: bool = False) -> Tensor:
    """Return boxes (x, y, z, dx, dy, dz, heading). In some problems many are equal, or some sides are not positive."""
    center, sides = draw.uniform(0, draw.pick(5.0, 20.0, 60.0), *shape, 3), draw.uniform(0.1, 15, *shape, 3)
    center, sides, angle = turned(draw, center, sides)
    if draw.chance(0.2):
        sides = torch.where(draw.uniform(0, 1, *shape, 3) < 0.2, -draw.whole(0, 3, *shape, 3), sides)
    boxes = torch.cat([center, sides, angle], -1)
    return boxes[..., FLAT] if is_flat else boxes


def _parts(box: list[float]) -> tuple[list[float], list[float]]:
    """Return a box seen from above, and its height z and side dz, which are 0 and 1 for (x, y, w, h, angle)."""
    return (box, [0.0, 1.0]) if len(box) == 5 else ([box[i] for i in FLAT], [box[2], box[5]])


def overlap(one: list[float], other: list[float], kind: str) -> float:
    """Return the IoU of two boxes, or the area that they share seen from above. NaN stands for what is not compared."""
    (flat, (z, dz)), (flat2, (z2, dz2)) = _parts(one), _parts(other)
    given = flat + flat2 if kind == "area" else one + other
    if kind == "area" and -math.inf in flat[2:4] + flat2[2:4]:
        return math.nan  # A negative side may count as 0 or as infinite.
    if not all(map(math.isfinite, given)):
        return IS_NAN
    if max(map(abs, given)) > EXTREME:
        return math.nan
    p, q = rectangle(*flat), rectangle(*flat2)
    common, areas = shared(p, q), (area(p), area(q))
    if kind == "area":
        return common
    common *= max(min(z + dz / 2, z2 + dz2 / 2) - max(z - dz / 2, z2 - dz2 / 2), 0.0)
    union = areas[0] * max(dz, 0.0) + areas[1] * max(dz2, 0.0) - common
    return common / union if union > 0 else IS_NAN if kind == "pair" else 0.0
