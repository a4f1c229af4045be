"""Voxels of point clouds, and sums of features over voxels and cells seen from above."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .. import _registration
from .._arguments import (
    check_numbers,
    check_that,
    computation_dtype,
    constant,
    is_index,
    numbers_to,
    places_in_groups,
    starts_of,
    widened,
)
from .._declared import check_indices, declared

__all__ = [
    "bev_pool",
    "bev_pool_v2",
    "dynamic_scatter",
    "dynamic_voxelize",
    "hard_voxelize",
    "scatter_to_voxels",
    "voxel_pooling",
]


@declared(
    points="real",
    voxel_size="D numbers, above 0",
    coors_range="2 * D numbers, above -inf",
    ndim="integer, at least 1",
)
def dynamic_voxelize(
    points: Tensor,  # [N, 3 or more]
    voxel_size: Sequence[float] | Tensor,
    coors_range: Sequence[float] | Tensor,
    ndim: int = 3,
) -> Tensor:  # [N, 3] int32
    """Return the voxel of each point.

    Args:
        points: [N, 3 or more]. The coordinates (x, y, z) and any features. 16-bit types are computed in float32.
        voxel_size: The size of a voxel (x, y, z), in the unit of the points.
        coors_range: The corners (x, y, z, x, y, z) of the grid.
        ndim: The number of coordinates.

    Returns:
        [N, 3] int32. The voxel (z, y, x). It is (-1, -1, -1) for a point outside the grid or with a NaN.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape or a size does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    fits = points.dim() == 2 and points.shape[1] >= ndim
    check_that(fits, "dynamic_voxelize", "points", "be [N, {} or more]", points, ndim)
    coordinates = constant(points[:, :ndim], points)
    size, corners = coordinates.new_tensor(voxel_size), coordinates.new_tensor(coors_range)
    check_that(len(size) == ndim, "dynamic_voxelize", "voxel_size", "be [{}]", size, ndim)
    return _dynamic_voxelize(coordinates, size, corners)


def dynamic_voxelize_reference(points: Tensor, voxel_size: Tensor, coors_range: Tensor) -> Tensor:
    """Return what the operator ``visdet::dynamic_voxelize`` returns, in plain torch."""
    low, high = coors_range.view(2, -1)
    # A sum of 3 sizes in float32 must not decide the number of voxels, so it is rounded as in mmcv.
    grid = ((high - low) / voxel_size).round()
    place = ((points - low) / voxel_size).floor()
    is_inside = is_index(place, grid).all(1, keepdim=True)
    return torch.where(is_inside, place, -1).flip(1).int()


_dynamic_voxelize = _registration.without_gradient(
    "dynamic_voxelize",
    "points [N, D] int32",
    dynamic_voxelize_reference,
    points="[N, D]",
    voxel_size="[D]",
    coors_range="[2 * D]",
)


@declared(
    points="real",
    voxel_size="D numbers, above 0",
    coors_range="2 * D numbers, above -inf",
    max_points="integer, at least 1",
    max_voxels="integer",
)
def hard_voxelize(
    points: Tensor,  # [N, 3 or more]
    voxel_size: Sequence[float] | Tensor,
    coors_range: Sequence[float] | Tensor,
    max_points: int = 35,
    max_voxels: int = 20000,
) -> tuple[Tensor, Tensor, Tensor]:  # [M, max_points, C], [M, 3] int32, [M] int32
    """Return the points of each voxel, the voxels, and the numbers of points.

    Args:
        points: [N, 3 or more]. The coordinates (x, y, z) and any features.
        voxel_size: As of ``dynamic_voxelize``.
        coors_range: As of ``dynamic_voxelize``.
        max_points: The largest number of points of a voxel. Later ones are dropped.
        max_voxels: The largest number of voxels. Later ones are dropped. A negative number means any.

    Returns:
        [M, max_points, C], [M, 3] int32 and [M] int32. The points, with zeros after the last one, the voxels (z, y, x)
        in the order of their first points, and the numbers of points.

    It is not differentiable. It is deterministic. On a GPU, the host waits for the number of voxels.

    Raises:
        ValueError: A shape or a size does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    coordinates = dynamic_voxelize(points, voxel_size, coors_range)
    inside = (coordinates[:, 0] >= 0).nonzero()[:, 0]
    _, voxel, count = _unique_rows(coordinates[inside])
    order = voxel.argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = places_in_groups(voxel[order], count)
    # Voxels are numbered by their first points.
    first = order[starts_of(count)]
    by_first = first.argsort()
    number = by_first.argsort()
    chosen = by_first if max_voxels < 0 else by_first[:max_voxels]
    voxels = points.new_zeros(len(chosen), max_points, points.shape[1])
    place = number[voxel]
    kept = (place < len(chosen)) & (rank < max_points)
    voxels[place[kept], rank[kept]] = points.detach()[inside[kept]]
    return voxels, coordinates[inside[first[chosen]]], count[chosen].clamp(max=max_points).int()


def keys_of_rows(
    first: Tensor, others: Iterable[Tensor], extents: Sequence[int]
) -> Tensor:  # [N], [D, N] -> [N]
    """Return ``((first * extents[0] + others[0]) * extents[1] + others[1]) ...``."""
    for column, extent in zip(others, extents, strict=True):
        first = first * extent + column
    return first


def rows_of_keys(keys: Tensor, extents: Sequence[int]) -> Tensor:  # [N] -> [N, 1 + D]
    """Return the rows that ``keys_of_rows`` gave these keys."""
    return torch.stack(torch.unravel_index(keys, (1 << 31, *extents)), 1)  # The first column has no extent.


def _unique_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [N, D] -> [M, D], [N], [M]
    """Return the different rows of integers from 0 on in rising order, the place of each row in them, and counts."""
    if len(rows) == 0:
        none = rows.new_zeros(0, dtype=torch.int64)
        return rows, none, none
    extents = [extent + 1 for extent in rows.amax(0).tolist()]
    if math.prod(extents) >= 1 << 63:
        return torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    key = keys_of_rows(rows[:, 0].long(), rows[:, 1:].T, extents[1:])
    unique, inverse, counts = torch.unique(key, return_inverse=True, return_counts=True)
    return rows_of_keys(unique, extents[1:]).to(rows), inverse, counts


@declared(
    "dynamic_scatter", feats="real [N, C]", coors="integers [N, D]", reduce_type="one of 'max', 'sum', 'mean'"
)
def scatter_to_voxels(
    feats: Tensor, coors: Tensor, reduce_type: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # [M, C], [M, D], [N] int32, [M] int32
    """Return what ``dynamic_scatter`` returns, each point's voxel or -1, and the number of points of each voxel."""
    check_that(coors.shape[1] > 0, "dynamic_scatter", "coors", "have a column", coors)
    if reduce_type == "mean":
        check_numbers("dynamic_scatter", "feats", feats, "floating")
    inside = (coors >= 0).all(1).nonzero()[:, 0]
    voxels, voxel, count = _unique_rows(coors[inside])
    reduced = feats.new_zeros(len(voxels), feats.shape[1], dtype=computation_dtype(feats))
    given = feats[inside].to(reduced)
    if reduce_type == "max":
        index = voxel[:, None].expand_as(given)
        # torch divides the gradient of a maximum among all that are equal to it, what was there before included.
        reduced = reduced.fill_(torch.nan).scatter_reduce(0, index, given, "amax", include_self=False)
    else:
        reduced = reduced.index_add(0, voxel, given)
    if reduce_type == "mean":
        reduced = reduced / count[:, None]
    voxel_of_point = coors.new_full((len(coors),), -1, dtype=torch.int32)
    voxel_of_point[inside] = voxel.int()
    return reduced.to(feats), voxels, voxel_of_point, count.int()


def dynamic_scatter(
    feats: Tensor,  # [N, C]
    coors: Tensor,  # [N, D]
    reduce_type: str = "max",
) -> tuple[Tensor, Tensor]:  # [M, C], [M, D]
    """Return the largest, mean or summed features of the points of each voxel, and the voxels.

    Args:
        feats: [N, C]. The features of the points. 16-bit types are computed in float32.
        coors: [N, D]. The voxel of each point. A point with a negative coordinate is left out.
        reduce_type: 'max', 'sum' or 'mean'.

    Returns:
        [M, C] and [M, D]. The features, and the voxels in rising order.

    It is differentiable with respect to the features. Points that share the largest feature share its gradient. (In
    mmcv, the first of them has it, which is so in the bridge too.) On a GPU, the host waits for the number of voxels.

    Raises:
        ValueError: A shape, type or ``reduce_type`` does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    return scatter_to_voxels(feats, coors, reduce_type)[:2]


def _sum_into(cells: Tensor, values: Tensor, size: int) -> Tensor:  # [N] in 0..size, [N, C] -> [size, C]
    """Return the sum of the values of each cell, in float32 or better. Values of the cell ``size`` are dropped."""
    wide = widened(values, values)
    summed = wide.new_zeros(size + 1, values.shape[1]).index_add(0, cells, wide)
    return summed[:size].to(values)


@declared(
    feats="real [N, C]",
    coords="real [N, 4]",
    B="integer, at least 0",
    D="integer, at least 0",
    H="integer, at least 0",
    W="integer, at least 0",
)
def bev_pool(
    feats: Tensor,  # [N, C]
    coords: Tensor,  # [N, 4] (x, y, z, image)
    B: int,
    D: int,
    H: int,
    W: int,
) -> Tensor:  # [B, D, H, W, C]
    """Return the sum of the features of each cell.

    Args:
        feats: [N, C]. The features of the points. 16-bit types are summed in float32.
        coords: [N, 4]. The row, the column and the layer of the cell of each point, and the image of the batch. Points
            outside the grid are left out.
        B: The size of the batch.
        D: The number of layers.
        H: The number of rows.
        W: The number of columns.

    Returns:
        [B, D, H, W, C]. The sums.

    It is differentiable with respect to the features.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: Project BEVFusion (mit-han-lab). The signature is its function's, whose result is permuted.
    """
    x, y, z, image = coords.long().unbind(1)
    is_inside = (coords >= 0).all(1) & (x < H) & (y < W) & (z < D) & (image < B)
    cells = B * D * H * W
    cell = torch.where(is_inside, keys_of_rows(image, (z, x, y), (D, H, W)), cells)
    return _sum_into(cell, feats, cells).view(B, D, H, W, feats.shape[1])


@declared(
    depth="floating [B, V, D, H, W]",
    feat="floating [B, V, H, W, C]",
    ranks_depth="integers [N]",
    ranks_feat="integers [N]",
    ranks_bev="integers [N]",
    cells="integer, at least 0",
)
def bev_pool_v2(
    depth: Tensor,  # [B, V, D, H, W]
    feat: Tensor,  # [B, V, H, W, C]
    ranks_depth: Tensor,  # [N]
    ranks_feat: Tensor,  # [N]
    ranks_bev: Tensor,  # [N]
    cells: int,
) -> Tensor:  # [cells, C]
    """Return the sum of the features of each cell, each multiplied by the probability of its depth.

    Args:
        depth: [B, V, D, H, W]. The probability of each depth at each pixel of each camera.
        feat: [B, V, H, W, C]. The features of the pixels.
        ranks_depth: [N]. The index of each point in the flattened ``depth``.
        ranks_feat: [N]. The index of its pixel.
        ranks_bev: [N]. The index of its cell.
        cells: The number of cells.

    Returns:
        [cells, C]. The sums. 16-bit types are summed in float32.

    It is differentiable with respect to ``depth`` and ``feat``.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.
        RuntimeError: An index is negative or too large. On CUDA it is a failed assertion, as of torch's own indices.

    Source: Paper "BEVPoolv2" (Huang and Huang).
    """
    check_indices("bev_pool_v2", "ranks_depth", ranks_depth, depth.numel(), "depths")
    check_indices("bev_pool_v2", "ranks_feat", ranks_feat, feat.shape[:-1].numel(), "pixels")
    check_indices("bev_pool_v2", "ranks_bev", ranks_bev, cells, "cells")
    weight = widened(depth.flatten(), feat)[ranks_depth.long(), None]
    values = widened(feat.flatten(0, -2), feat)[ranks_feat.long()] * weight
    return _sum_into(ranks_bev.long(), values, cells).to(feat)


@declared(input_features="real [B, N, C]", geom_xyz="real [B, N, 3]", voxel_num="3 integers, at least 0")
def voxel_pooling(
    geom_xyz: Tensor,  # [B, N, 3]
    input_features: Tensor,  # [B, N, C]
    voxel_num: Sequence[int] | Tensor,
) -> Tensor:  # [B, H, W, C]
    """Return the sum of the features of each column of voxels.

    Args:
        geom_xyz: [B, N, 3]. The voxel (x, y, z) of each point. Points outside the grid are left out.
        input_features: [B, N, C]. The features of the points. 16-bit types are summed in float32.
        voxel_num: The number of voxels (x, y, z).

    Returns:
        [B, H, W, C]. The sums, with H and W the number of voxels in y and x.

    It is differentiable with respect to the features.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: Project BEVDepth, whose result is permuted.
    """
    (B, _, C), (W, H, D) = input_features.shape, voxel_num
    x, y, z = geom_xyz.long().unbind(2)
    is_inside = (geom_xyz >= 0).all(2) & (x < W) & (y < H) & (z < D)
    image = numbers_to(B, x)[:, None]
    num_cells = B * H * W
    cell = torch.where(is_inside, keys_of_rows(image, (y, x), (H, W)), num_cells)
    return _sum_into(cell.flatten(), input_features.flatten(0, 1), num_cells).view(B, H, W, C)
