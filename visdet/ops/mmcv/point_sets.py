"""Point sets of oriented detectors: their convex hulls, the overlaps of these with polygons, and the smallest boxes."""

import math

import torch
from torch import Tensor

from .. import _registration
from .._arguments import common_constants, exact, widened
from .._declared import declared
from ..box_iou_rotated import cross_of, polygon_area, shared_area
from ..point_neighbours import row_ranges

__all__ = ["chamfer_distance", "convex_giou", "convex_iou", "min_area_polygons", "points_in_polygons"]


def _places(rows: Tensor) -> Tensor:  # [N, 2 * K] -> [N, K, 2] float64
    return exact(rows).unflatten(1, (-1, 2))


def _origin_beside(points: Tensor) -> Tensor:  # [N, 2 * K] -> [N, 1, 2] float64
    """Return an origin for each row of points (x, y), such that results are as exact wherever these are.

    They are at least as far from it as they are apart, up to a power of two, which leaves whole numbers whole.
    """
    low, high = _places(points).aminmax(dim=1, keepdim=True)
    extent = (high - low).amax(2, keepdim=True)
    return low - torch.where(extent > 0, extent / extent.frexp().mantissa, extent)


def _moved(points: Tensor, by: Tensor) -> Tensor:
    return (_places(points) + by).flatten(1)


@torch.no_grad()
def hull_indices(points: Tensor) -> Tensor:  # [N, K, 2] float64 -> [N, K]
    """Return the convex hull of each set: its points from the one of least y (then x) on, from x towards y.

    Where the hull has fewer than K points, the first one follows the last, again and again.
    """
    K = points.shape[1]
    edges = points[:, None] - points[:, :, None]  # [N, from, to]
    length = edges.square().sum(-1)
    side = cross_of(
        edges[:, :, :, None], edges[:, :, None]
    )  # [N, from, to, other]: negative if right of the edge
    slack = 1e-14 * length.flatten(1).amax(1)[:, None, None]
    # A point's successor has all others to its left; the furthest one of those on a line, but the first corner before a
    # point that is so near to it that both may follow.
    has_no_other = (side >= -slack[..., None]).all(-1) & (length > 0)
    successor = torch.where(has_no_other, length, -1.0).argmax(2)  # [N, K]
    x, y = points.unbind(2)
    first_row = y.amin(1, keepdim=True)
    start = torch.where(y == first_row, x, math.inf).argmin(1, keepdim=True)
    closes = has_no_other.take_along_dim(start[:, None], 2).squeeze(2)
    successor = torch.where(closes, start, successor)
    at, hull, is_closed = start, [start], torch.zeros_like(start, dtype=torch.bool)
    for _ in range(K - 1):
        at = successor.gather(1, at)
        is_same = points.take_along_dim(at[..., None], 1) == points.take_along_dim(start[..., None], 1)
        is_closed = is_closed | is_same.all(-1)
        at = torch.where(is_closed, start, at)
        hull.append(at)
    return torch.cat(hull, 1)


def _hulls(points: Tensor) -> Tensor:
    of_set = 3 * points.shape[1] ** 3  # numbers that are compared
    indices = [hull_indices(points[rows].detach()) for rows in row_ranges(len(points), of_set)]
    hulls = points.take_along_dim(torch.cat(indices)[..., None], 1)
    return hulls + 0 * points.detach().sum((1, 2), keepdim=True)  # NaN if a point is not finite


def _divided(a: Tensor, b: Tensor) -> Tensor:
    is_positive = b > 0
    return torch.where(is_positive, a / torch.where(is_positive, b, 1.0), 0.0)


@declared(pointsets="floating [N, 18]", polygons="floating [K, 8]")
def convex_iou(pointsets: Tensor, polygons: Tensor) -> Tensor:  # [N, 18], [K, 8] -> [N, K]
    """Return the IoU of the convex hull of each point set with each polygon.

    Args:
        pointsets: [N, 18] (x1, y1, ..., x9, y9). Sets of nine points.
        polygons: [K, 8] (x1, y1, ..., x4, y4). Quadrilaterals that do not cross themselves, either way round.

    Returns:
        [N, K]. The overlaps in the type of ``pointsets``. They are computed in float64. If neither has an area, the
        overlap is 0. A NaN or an infinite number makes the overlap NaN.

    It is not differentiable; ``convex_giou`` is. It is deterministic.

    Raises:
        ValueError: A shape, type or device does not fit. The message names the argument.

    Source: The signature is mmcv's (CFA, arXiv 1912.02424; Oriented RepPoints, arXiv 2105.11111).
    """
    return _convex_iou(exact(pointsets), exact(polygons)).to(pointsets)


def convex_iou_reference(pointsets: Tensor, polygons: Tensor) -> Tensor:
    """Return what the operator ``visdet::convex_iou`` returns, in plain torch."""
    hulls = _hulls(_places(pointsets))
    q = _places(polygons)
    areas = polygon_area(q)
    ious = pointsets.new_empty(len(hulls), len(q))
    for rows in row_ranges(len(hulls), 36 * len(q)):  # numbers of a set and a polygon
        p = hulls[rows]
        p_areas = polygon_area(p)[:, None]
        shared = torch.minimum(shared_area(p[:, None], q, are_boxes=False), torch.minimum(p_areas, areas))
        ious[rows] = _divided(shared, p_areas + areas - shared) + 0 * (p_areas + areas)
    return ious


@declared(pointsets="floating [N, 18]", polygons="floating [N, 8]")
def convex_giou(
    pointsets: Tensor, polygons: Tensor
) -> tuple[Tensor, Tensor]:  # [N, 18], [N, 8] -> [N], [N, 18]
    """Return the generalised IoU of each point set's hull with the polygon of its row, and its gradient.

    Args:
        pointsets: [N, 18] (x1, y1, ..., x9, y9). Sets of nine points.
        polygons: [N, 8] (x1, y1, ..., x4, y4). As of ``convex_iou``.

    Returns:
        ([N], [N, 18]). The IoU minus the share of the common hull that neither covers, and its derivatives with respect
        to ``pointsets``, both in the type of ``pointsets``. They are computed in float64. Points inside the hull have
        no gradient. Where sides or corners coincide, the derivatives are mmcv's, between those of both sides. Those of
        sides in line with the origin are right, which mmcv's are not. A set and a polygon without area give 0, and
        numbers that are not finite NaN.

    The results are not differentiable: losses multiply the derivatives themselves. It is deterministic.

    Raises:
        ValueError: A shape, type or device does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    origin = _origin_beside(torch.cat([pointsets, polygons], 1))
    giou, gradient = _convex_giou(_moved(pointsets, -origin), _moved(polygons, -origin))
    return giou.to(pointsets), gradient.to(pointsets)


def convex_giou_reference(pointsets: Tensor, polygons: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the operator ``visdet::convex_giou`` returns, in plain torch.

    Where sides or corners coincide, the derivatives are those of one side.
    """
    with torch.enable_grad():
        leaf = exact(pointsets).requires_grad_()
        points, q = leaf.view(-1, 9, 2), _places(polygons)
        p = _hulls(points)
        areas, q_areas, common = (
            polygon_area(p),
            polygon_area(q),
            polygon_area(_hulls(torch.cat([points, q], 1))),
        )
        shared = shared_area(p, q, are_boxes=False)
        union = areas + q_areas - shared
        giou = _divided(shared, union) - _divided(common - union, common) + 0 * common
        (gradient,) = torch.autograd.grad(giou.sum(), leaf)
    giou = giou.detach()
    return giou.to(pointsets), (gradient + 0 * giou[:, None]).to(pointsets)


@declared(pointsets="floating [N, 18]")
def min_area_polygons(pointsets: Tensor) -> Tensor:  # [N, 18] -> [N, 8]
    """Return the corners of the box of the smallest area around each set of nine points.

    Args:
        pointsets: [N, 18] (x1, y1, ..., x9, y9). Sets of nine points.

    Returns:
        [N, 8] (x1, y1, ..., x4, y4). The corners in the type of ``pointsets``, computed in float64. One side of the box
        is on an edge of the convex hull, of equal boxes on the first from the point of least y on. The first corner is
        the one of greatest x and least y before the box is rotated by an angle of 0 to 90 degrees, and the others
        follow from there against x. A NaN or an infinite number makes the corners NaN.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape, type or device does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    origin = _origin_beside(pointsets)
    return _moved(_min_area_polygons(_moved(pointsets, -origin)), origin).to(pointsets)


def min_area_polygons_reference(pointsets: Tensor) -> Tensor:
    """Return what the operator ``visdet::min_area_polygons`` returns, in plain torch."""
    hull = _hulls(_places(pointsets))
    edges = hull.roll(-1, 1) - hull
    angle = torch.atan2(edges[..., 1], edges[..., 0]).remainder(math.pi / 2)  # [N, edge]
    cosine, sine = angle.cos(), angle.sin()
    axes = torch.stack([cosine, -sine, sine, cosine], -1).unflatten(-1, (2, 2))  # [N, edge, (x, y), side]
    low, high = (hull[:, None] @ axes).aminmax(dim=2)  # [N, edge, side]
    area = (high - low).prod(-1)
    area = torch.where((edges != 0).any(-1) | (edges == 0).all((1, 2))[:, None], area, math.inf)
    best = (area <= area.amin(1, keepdim=True) * (1 + 1e-6)).int().argmax(1)[:, None, None]
    low, high = low.take_along_dim(best, 1), high.take_along_dim(best, 1)  # [N, 1, side]
    is_high = torch.tensor([[True, False], [False, False], [False, True], [True, True]], device=low.device)
    corners = torch.where(is_high, high, low) @ axes.take_along_dim(best[..., None], 1).squeeze(1).mT
    return corners.flatten(1).to(pointsets)


@declared(points="real [N, 2]", polygons="real [M, 8]")
@torch.no_grad()
def points_in_polygons(points: Tensor, polygons: Tensor) -> Tensor:  # [N, 2], [M, 8] -> [N, M]
    """Return 1.0 where a point lies in a quadrilateral, and 0.0 elsewhere.

    Args:
        points: [N, 2] (x, y). The points.
        polygons: [M, 8] (x1, y1, ..., x4, y4). Quadrilaterals that do not cross themselves, either way round.

    Returns:
        [N, M] float32, computed in float64. A point is inside if a ray from it towards greater x crosses the sides an
        odd number of times. For a point on the boundary the result is either, the same as mmcv's. A point with a NaN
        or an infinite number is outside.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape does not fit. The message names the argument.
        RuntimeError: The points and polygons are on different devices.

    Source: The signature is mmcv's.
    """
    return _points_in_polygons(exact(points), exact(polygons))


def points_in_polygons_reference(points: Tensor, polygons: Tensor) -> Tensor:
    """Return what the operator ``visdet::points_in_polygons`` returns, in plain torch."""
    # Sides from (tx, ty) to (sx, sy), broadcast to [4, n, M].
    corners = polygons.reshape(-1, 4, 2).permute(1, 2, 0)[:, :, None]
    (sx, sy), (tx, ty) = corners.unbind(1), corners.roll(1, 0).unbind(1)
    inside = points.new_empty(len(points), len(polygons), dtype=torch.float32)
    for rows in row_ranges(len(points), 16 * len(polygons)):
        px, py = points[rows, :, None].unbind(1)  # [n, 1]
        spans = (sy < py) != (ty < py)
        x = sx + (py - sy) * (tx - sx) / (ty - sy)
        is_decided = ((sx == px) & (sy == py)) | ((tx == px) & (ty == py)) | (spans & (x == px))
        is_decided = is_decided.cummax(0).values  # A point on a side is decided for the later ones, too.
        crossings = spans & (x > px) & ~is_decided
        inside[rows] = (crossings.sum(0) % 2).to(inside)
    return inside


@declared(xyz1="floating [B, N, 2]", xyz2="floating [B, M, 2]")
def chamfer_distance(
    xyz1: Tensor,  # [B, N, 2]
    xyz2: Tensor,  # [B, M, 2]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [B, N], [B, M], [B, N], [B, M]
    """Return the squared distance of each point to the nearest point of the other set, and that point's index.

    Args:
        xyz1: [B, N, 2]. Sets of points (x, y).
        xyz2: [B, M, 2]. The other sets.

    Returns:
        (distances of xyz1, distances of xyz2, indices into xyz2, indices into xyz1). Distances are in the type of the
        points, computed in float32 at least, indices in int32; of points equally far, the first one. Without other
        points, distances and indices are 0. A NaN in a set makes all distances to it NaN.

    The distances are differentiable with respect to both sets.

    Raises:
        ValueError: A shape, type or device does not fit. The message names the argument.

    Source: Oriented RepPoints, arXiv 2105.11111; the signature is mmcv's.
    """
    points1, points2 = common_constants(xyz1, xyz2)
    nearest1, nearest2 = _nearest_points(points1, points2), _nearest_points(points2, points1)
    return *squared_distances(xyz1, xyz2, nearest1, nearest2), nearest1, nearest2


def nearest_points_reference(
    points: Tensor, others: Tensor
) -> Tensor:  # [B, N, 2], [B, M, 2] -> [B, N] int32
    """Return what the operator ``visdet::nearest_points`` returns, in plain torch."""
    index = torch.zeros(points.shape[:2], dtype=torch.int32, device=points.device)
    num_others = others.shape[1]
    if num_others:
        for rows in row_ranges(points.shape[1], 2 * len(points) * num_others):
            apart = (points[:, rows, None] - others[:, None]).square().sum(-1)
            index[:, rows] = apart.argmin(-1)
    return index


def squared_distances(
    xyz1: Tensor, xyz2: Tensor, nearest1: Tensor, nearest2: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the squared distances of the points to those of the other set with the given indices."""
    wide1, wide2 = widened(xyz1, xyz1), widened(xyz2, xyz2)
    return _distances_to(wide1, wide2, nearest1).to(xyz1), _distances_to(wide2, wide1, nearest2).to(xyz2)


def _distances_to(points: Tensor, others: Tensor, nearest: Tensor) -> Tensor:
    """Return the squared distance of each point to that of ``others`` with the index, or 0 if there is none."""
    if others.shape[1] == 0:
        return points.sum(-1) * 0
    return (points - others.take_along_dim(nearest.long()[..., None], 1)).square().sum(-1)


_LAYOUTS = {"pointsets": "[N, 18]", "polygons": "[K, 8]"}
_min_area_polygons = _registration.without_gradient(
    "min_area_polygons",
    "pointsets [N, 8]",
    min_area_polygons_reference,
    pointsets="[N, 18]",
)
_convex_iou = _registration.without_gradient(
    "convex_iou", "pointsets [N, K]", convex_iou_reference, **_LAYOUTS
)
_convex_giou = _registration.without_gradient(
    "convex_giou", "pointsets [N], pointsets [N, 18]", convex_giou_reference, **_LAYOUTS
)
_points_in_polygons = _registration.without_gradient(
    "points_in_polygons",
    "points [N, M] float32",
    points_in_polygons_reference,
    points="[N, 2]",
    polygons="[M, 8]",
)
_nearest_points = _registration.without_gradient(
    "nearest_points",
    "points [B, N] int32",
    nearest_points_reference,
    points="[B, N, 2]",
    others="[B, M, 2]",
)
