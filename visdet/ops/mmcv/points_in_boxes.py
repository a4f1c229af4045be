"""Points within 3-D boxes, and their features pooled over boxes."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _registration
from .._arguments import constants, empty_sum, numbers_to, places_in_groups, widened
from .._declared import declared
from ..gather_points import gathered
from ..point_neighbours import first_marked, row_ranges
from .voxels import keys_of_rows

__all__ = [
    "collect_points",
    "first_of_groups",
    "places_of",
    "points_in_boxes_all",
    "points_in_boxes_part",
    "pool_collected",
    "roiaware_pool3d",
    "roipoint_pool3d",
]


def _places(
    points: Tensor, boxes: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [..., N, 3], [..., M, 7] -> [..., M, N] each
    """Return x, y and z of each point in the axes of each box, from its bottom center, and whether it is inside."""
    cx, cy, bottom, dx, dy, dz, heading = boxes[..., None].unbind(-2)
    px, py, pz = points[..., None, :, :].unbind(-1)
    cosine, sine = heading.cos(), heading.sin()
    x, y, z = px - cx, py - cy, pz - bottom
    x, y = x * cosine + y * sine, y * cosine - x * sine
    is_inside = ((z - dz / 2).abs() <= dz / 2) & (x.abs() < dx / 2) & (y.abs() < dy / 2)
    return x, y, z, is_inside


def _inside_by_rows(points: Tensor, boxes: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of points [B, N, 3] with whether each of them is in each box, [B, M, points of the range]."""
    for rows in row_ranges(points.shape[1], boxes.shape[:2].numel()):
        yield rows, _places(points[:, rows], boxes)[3]


@declared(points="real [B, N, 3]", boxes="real [B, M, 7]")
def points_in_boxes_part(
    points: Tensor,  # [B, N, 3]
    boxes: Tensor,  # [B, M, 7] (x, y, z, dx, dy, dz, heading)
) -> Tensor:  # [B, N] int32
    """Return the first box that each point is in, or -1.

    Args:
        points: [B, N, 3]. The points. 16-bit types are computed in float32.
        boxes: [B, M, 7]. The center of the bottom, the sides, and the angle of the side dx with the x axis, towards the
            y axis, in radians.

    Returns:
        [B, N] int32. The indices. A point on the bottom or the top is inside, and one on another side is not.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    return _points_in_boxes_part(*constants(points, boxes))


def points_in_boxes_part_reference(points: Tensor, boxes: Tensor) -> Tensor:
    """Return what the operator ``visdet::points_in_boxes_part`` returns, in plain torch."""
    result = points.new_empty(points.shape[:2], dtype=torch.int32)
    for rows, is_inside in _inside_by_rows(points, boxes):
        # Each point counts as within one more box, the last one.
        result[:, rows] = F.pad(is_inside.int(), (0, 0, 0, 1), value=1).argmax(1)
    return result.masked_fill_(result == boxes.shape[1], -1)


@declared(points="real [B, N, 3]", boxes="real [B, M, 7]")
def points_in_boxes_all(
    points: Tensor,  # [B, N, 3]
    boxes: Tensor,  # [B, M, 7] (x, y, z, dx, dy, dz, heading)
) -> Tensor:  # [B, N, M] int32
    """Return 1 for each point and box that it is in, and 0 for the others.

    Args:
        points: [B, N, 3]. As of ``points_in_boxes_part``.
        boxes: [B, M, 7]. As of ``points_in_boxes_part``.

    Returns:
        [B, N, M] int32. As said above.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    return _points_in_boxes_all(*constants(points, boxes))


def points_in_boxes_all_reference(points: Tensor, boxes: Tensor) -> Tensor:
    """Return what the operator ``visdet::points_in_boxes_all`` returns, in plain torch."""
    result = points.new_zeros(*points.shape[:2], boxes.shape[1], dtype=torch.int32)
    for rows, is_inside in _inside_by_rows(points, boxes):
        result[:, rows] = is_inside.transpose(1, 2)
    return result


@declared(
    "roiaware_pool3d",
    rois="real [M, 7]",
    pts="real [N, 3]",
    size="3 integers, at least 1",
    max_pts_per_voxel="integer, at least 1",
)
def collect_points(
    rois: Tensor,  # [M, 7]
    pts: Tensor,  # [N, 3]
    size: tuple[int, int, int],
    max_pts_per_voxel: int,
) -> Tensor:  # [M, *size, max_pts_per_voxel] int32
    """Return the number of points in each voxel of each box and then the points, which fill the last dimension."""
    X, Y, Z = size
    points, boxes = constants(pts, rois)
    keys, indices = [], []
    for rows in row_ranges(len(boxes), len(points)):
        some = boxes[rows]
        extents = some[:, 3:6]
        x, y, z, is_inside = _places(points, some)
        is_inside = is_inside & extents.isfinite().all(1, keepdim=True)
        box, point = is_inside.nonzero(as_tuple=True)
        sides = extents[box]
        places = torch.stack([x[box, point], y[box, point], z[box, point]], 1)
        places[:, :2] += sides[:, :2] / 2
        counts = places.new_tensor(size)
        voxel = (places / (sides / counts)).long().clamp(min=0).minimum(counts.long() - 1)
        keys.append(keys_of_rows(box + rows.start, voxel.T, size))
        indices.append(point)
    voxels = len(rois) * X * Y * Z
    collected = pts.new_zeros(voxels, max_pts_per_voxel, dtype=torch.int32)
    if voxels:
        key, order = torch.cat(keys).sort(stable=True)
        count = key.bincount(minlength=voxels)
        rank = places_in_groups(key, count)
        kept = rank < max_pts_per_voxel - 1
        collected[key[kept], rank[kept] + 1] = torch.cat(indices)[order][kept].int()
        collected[:, 0] = count.clamp(max=max_pts_per_voxel - 1)
    return collected.view(len(rois), X, Y, Z, max_pts_per_voxel)


def pairs_of(collected: Tensor) -> tuple[Tensor, Tensor]:
    """Return the voxel and the point of each point that ``collect_points`` has put into a voxel."""
    flat = collected.flatten(0, 3)
    count = flat[:, 0].long()
    voxel = torch.repeat_interleave(count)
    return voxel, flat[voxel, 1 + places_in_groups(voxel, count)].long()


def places_of(argmax: Tensor) -> Tensor:  # [..., C] -> [1, ..., 1]
    """Return the places of the features [N, C] of points and of all channels, and numbers below 0 for no point, -1."""
    C = argmax.shape[-1]
    return numbers_to(C, argmax).add(argmax, alpha=C).view(1, -1, 1)


def first_of_groups(
    marks: Tensor,  # [N, C]
    group: Tensor,  # [N]
    number: Tensor,  # [N]
    groups: int,
    none: int,
) -> Tensor:  # [groups, C]
    """Return the least number of the marked rows of each group and column, or ``none`` where no row is marked."""
    marked = torch.where(marks, number[:, None], none)
    least = marked.new_full((groups, marks.shape[1]), none)
    return least.scatter_reduce(0, group[:, None].expand_as(marked), marked, "amin")


def pool_collected(
    collected: Tensor,  # [M, X, Y, Z, K] of collect_points
    pts_feature: Tensor,  # [N, C]
    mode: str,
) -> tuple[Tensor, Tensor]:  # [M, X, Y, Z, C], [M, X, Y, Z, C] int32
    """Return the largest or mean feature of each voxel, and for 'max' the point that it comes from, or -1."""
    voxel, point = pairs_of(collected)
    voxels, C = collected[..., 0].numel(), pts_feature.shape[1]
    features = widened(pts_feature, pts_feature)
    if mode == "avg":
        pooled = features.new_zeros(voxels, C).index_add(0, voxel, features[point])
        pooled = pooled / collected.flatten(0, 3)[:, :1].clamp(min=1)
        argmax = point.new_full((voxels, C), -1)
    else:
        values, none = features.detach()[point], len(features)
        known = torch.where(values.isnan(), -torch.inf, values)
        largest = values.new_full((voxels, C), -torch.inf)
        largest = largest.scatter_reduce(0, voxel[:, None].expand_as(known), known, "amax")
        is_largest = (known == largest[voxel]) & (known > -torch.inf)
        first = first_of_groups(is_largest, voxel, point, voxels, none)
        argmax = torch.where(first < none, first, -1)
        pooled = gathered(features.reshape(1, 1, -1), places_of(argmax), zeros_outside=True)
    shape = (*collected.shape[:4], C)
    return pooled.to(pts_feature).view(shape), argmax.int().view(shape)


@declared(
    rois="real [M, 7]",
    pts="real [N, 3]",
    pts_feature="real [N, C]",
    out_size="1 or 3 integers, at least 1",
    max_pts_per_voxel="integer, at least 1",
    mode="one of 'max', 'avg'",
)
def roiaware_pool3d(
    rois: Tensor,  # [M, 7]
    pts: Tensor,  # [N, 3]
    pts_feature: Tensor,  # [N, C]
    out_size: int | tuple[int, int, int],
    max_pts_per_voxel: int = 128,
    mode: str = "max",
) -> Tensor:  # [M, X, Y, Z, C]
    """Return the largest or mean feature of the points in each voxel of each box.

    Args:
        rois: [M, 7]. The boxes, as of ``points_in_boxes_part``.
        pts: [N, 3]. The points.
        pts_feature: [N, C]. Their features. 16-bit types are computed in float32.
        out_size: The number of voxels (x, y, z) along the sides of a box, or one number for all.
        max_pts_per_voxel: One more than the number of points that count. Later ones are dropped.
        mode: 'max' or 'avg'. The largest feature is one that is neither NaN nor minus infinity.

    Returns:
        [M, X, Y, Z, C]. The features. A voxel without points has 0, and so has every voxel of an infinite box.

    It is differentiable with respect to the features. On a GPU, the host waits for the number of points in the boxes.

    Raises:
        ValueError: A shape or ``mode`` does not fit. The message names the argument.

    Source: Paper "Part-A2 Net" (Shi et al.). The signature is mmcv's.
    """
    size = (out_size,) * 3 if isinstance(out_size, int) else out_size
    return pool_collected(collect_points(rois, pts, size, max_pts_per_voxel), pts_feature, mode)[0]


@declared(
    points="real [B, N, 3]",
    point_features="floating [B, N, C]",
    boxes3d="real [B, M, 7]",
    num_sampled_points="integer, at least 0",
)
def roipoint_pool3d(
    points: Tensor,  # [B, N, 3]
    point_features: Tensor,  # [B, N, C]
    boxes3d: Tensor,  # [B, M, 7]
    num_sampled_points: int = 512,
) -> tuple[Tensor, Tensor]:  # [B, M, num_sampled_points, 3 + C], [B, M] int32
    """Return the first points in each box with their features, and whether a box is empty.

    Args:
        points: [B, N, 3]. The points.
        point_features: [B, N, C]. Their features.
        boxes3d: [B, M, 7]. The boxes, as of ``points_in_boxes_part``.
        num_sampled_points: The number of points of a box. If it has fewer, they are repeated in their order.

    Returns:
        [B, M, num_sampled_points, 3 + C] and [B, M] int32. The coordinates and features, and 1 for an empty box, whose
        points are 0.

    It is differentiable with respect to the points and the features. (mmcv's is not.) On a GPU, the host waits for the
    number of points in the boxes.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.

    Source: Paper "PointRCNN" (Shi et al.). The signature is mmcv's.
    """
    inside, boxes = constants(points, boxes3d)
    B, N = points.shape[:2]
    # The gradient of a point in many boxes is a sum, which needs float32.
    values = torch.cat([widened(one, point_features) for one in (points, point_features)], 2)
    num_boxes = boxes.shape[1]
    pooled = values.new_zeros(B, num_boxes, num_sampled_points, values.shape[2]) + empty_sum(values)
    is_empty = boxes.new_ones(B, num_boxes, dtype=torch.int32)
    if N == 0:
        return pooled.to(point_features), is_empty
    slots = numbers_to(num_sampled_points, points)
    parts = []
    for image, (cloud, its_boxes) in enumerate(zip(inside, boxes, strict=True)):
        for rows in row_ranges(len(its_boxes), N):
            index, found = first_marked(_places(cloud, its_boxes[rows])[3], num_sampled_points)
            index = index.gather(1, slots % found.clamp(1, num_sampled_points)[:, None])
            parts.append(torch.where((found > 0)[:, None, None], values[image][index], 0).to(point_features))
            is_empty[image, rows] = (found == 0).int()
    return torch.cat(parts).view(pooled.shape) if parts else pooled.to(point_features), is_empty


_LAYOUTS = {"points": "[B, N, 3]", "boxes": "[B, M, 7]"}
_points_in_boxes_part = _registration.without_gradient(
    "points_in_boxes_part",
    "points [B, N] int32",
    points_in_boxes_part_reference,
    **_LAYOUTS,
)
_points_in_boxes_all = _registration.without_gradient(
    "points_in_boxes_all",
    "points [B, N, M] int32",
    points_in_boxes_all_reference,
    **_LAYOUTS,
)
