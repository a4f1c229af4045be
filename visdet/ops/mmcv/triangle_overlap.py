"""The area that two polygons share, as mmcv adds it up: its gradient is the same where sides or corners coincide."""

import torch
from torch import Tensor

from ..box_iou_rotated import cross_of

__all__ = ["overlap_by_triangles"]

TOLERANCE = 1e-8  # within which mmcv takes a point to lie on a line, or for another one


def overlap_by_triangles(p: Tensor, q: Tensor) -> Tensor:  # [N, K, 2], [N, 4, 2] float64 -> [N]
    """Return the shared areas of polygons p and q, both turning from x towards y, as a sum over pairs of their sides.

    Each side of a polygon spans a triangle with the origin. The sum takes the signed overlaps of all pairs of
    triangles. It is differentiable with respect to p, also where a side is in line with the origin, whose triangle has
    no area and no derivative in mmcv: such pairs are moved. Small ones are enlarged, as the tolerance is for pixels.
    """
    N, K, _ = p.shape
    size = torch.cat([p, q], 1).detach().abs().amax((1, 2))[:, None, None]
    unit = torch.where(size > 0, size.clamp(max=1), 1)
    sides = p.roll(-1, 1) - p
    is_in_line = (_sign(cross_of(p, p.roll(-1, 1)) / unit[..., 0].square()) == 0) & (sides != 0).any(2)
    away = is_in_line.any(1)[:, None, None] * size * p.new_tensor([1.9, 3.1])
    p, q = (p + away) / unit, (q + away) / unit
    a, b, sign1 = _sides(p[:, :, None].expand(N, K, 4, 2), 1)
    c, d, sign2 = _sides(q[:, None].expand(N, K, 4, 2), 2)
    origin = torch.zeros_like(a)
    cut, exists = torch.stack([origin, a, b], 1), torch.ones(len(a), 3, dtype=torch.bool, device=a.device)
    for start, end in ((origin, c), (c, d), (d, origin)):
        cut, exists = _cut(cut, exists, start, end)
    area = torch.where(exists, cross_of(cut, _next(cut, exists)), 0.0).sum(1) / 2
    return (area * sign1 * sign2).view(N, 4 * K).sum(1) * unit[:, 0, 0].square()


def _sides(corners: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ends [M, 2] of the sides along ``dim`` such that they turn from x towards y, and whether they did."""
    first, second = (t.reshape(-1, 2) for t in (corners, corners.roll(-1, dim)))
    sign = _sign(cross_of(first, second))
    turns_back = (sign < 0)[:, None]
    return torch.where(turns_back, second, first), torch.where(turns_back, first, second), sign


def _sign(x: Tensor) -> Tensor:
    return (x > TOLERANCE).int() - (x < -TOLERANCE).int()


def _next(polygon: Tensor, exists: Tensor) -> Tensor:
    """Return the point behind each point. The points that exist come first, and the first one is behind the last."""
    K = exists.shape[1]
    place = torch.arange(1, K + 1, device=exists.device)
    place = torch.where(place < exists.sum(1, keepdim=True), place, 0)
    return polygon.gather(1, place[..., None].expand(-1, -1, 2))


def _moved_up(points: Tensor, exists: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the points that exist before the others, and ``count`` points at the most."""
    order = (~exists).int().sort(dim=1, stable=True).indices[:, :count]
    return points.gather(1, order[..., None].expand(-1, -1, 2)), exists.gather(1, order)


def _cut(polygon: Tensor, exists: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of polygons [M, K, 2] to the left of lines, and which of their points exist."""
    K = exists.shape[1]
    along, behind = (end - start)[:, None], _next(polygon, exists)
    here, there = (cross_of(along, points - start[:, None]) for points in (polygon, behind))
    crosses = exists & (_sign(here) != _sign(there))
    apart = torch.where(crosses, there - here, 1.0)[..., None]
    crossing = (polygon * there[..., None] - behind * here[..., None]) / apart
    kept = torch.stack([exists & (_sign(here) > 0), crosses], 2).flatten(1)
    points, exists = _moved_up(torch.stack([polygon, crossing], 2).flatten(1, 2), kept, K + 2)
    is_repeated = (_sign(points - points.roll(1, 1)) == 0).all(-1)
    is_repeated[:, 0] = False
    points, exists = _moved_up(points, exists & ~is_repeated, K + 2)
    # Points at the end that are the first one again are dropped, too.
    is_first = (_sign(points - points[:, :1]) == 0).all(-1)
    is_first[:, 0] = False
    others_behind = (exists & ~is_first).int().flip(1).cumsum(1).flip(1) > 0
    return points, exists & (others_behind | (torch.arange(K + 2, device=exists.device) == 0))
