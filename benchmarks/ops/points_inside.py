"""Cases of points in 3-D boxes, in quadrilaterals and in voxels, with sizes of mmdet3d's and mmrotate's detectors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.mmcv.point_sets import points_in_polygons_reference
from visdet.ops.mmcv.points_in_boxes import points_in_boxes_all_reference, points_in_boxes_part_reference
from visdet.ops.mmcv.voxels import dynamic_voxelize_reference

from ..case import Case, Work, peer_of

__all__ = ["CASES"]


def _boxes(dtype: torch.dtype, device: torch.device, *, B: int, N: int, M: int) -> tuple[Tensor, ...]:
    """Return points in a square of 80 m, and boxes with sides of 1 to 5 m."""
    generator = torch.Generator().manual_seed(0)
    extent = torch.tensor([80.0, 80.0, 4.0])
    points = torch.rand(B, N, 3, generator=generator) * extent
    centers, sides = (
        torch.rand(B, M, 3, generator=generator) * extent,
        1 + 4 * torch.rand(B, M, 3, generator=generator),
    )
    boxes = torch.cat([centers, sides, 7 * torch.rand(B, M, 1, generator=generator)], 2)
    return points.to(device, dtype), boxes.to(device, dtype)


def _polygons(dtype: torch.dtype, device: torch.device, *, N: int, M: int) -> tuple[Tensor, ...]:
    """Return points in an image of 1024 x 1024 pixels, and diamonds with a half diagonal of up to 128 pixels."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.tensor([[-1.0, 0], [0, -1], [1, 0], [0, 1]])
    centers, halves = (
        1024 * torch.rand(M, 1, 2, generator=generator),
        128 * torch.rand(M, 1, 1, generator=generator),
    )
    points = 1024 * torch.rand(N, 2, generator=generator)
    return points.to(device, dtype), (centers + halves * corners).flatten(1).to(device, dtype)


def _voxels(dtype: torch.dtype, device: torch.device, *, N: int) -> tuple[Tensor, ...]:
    """Return points in and around nuScenes' range, voxels of an eighth of a metre, and that range."""
    # The points are in the middle of voxels, because float32 and float64 differ at borders.
    drawn = torch.rand(N, 3, generator=torch.Generator().manual_seed(0)) - 0.5
    points = ((drawn * torch.tensor([880.0, 880, 72])).floor() + 0.5) / 8
    size, extent = [0.125] * 3, [-51.25, -51.25, -5.0, 51.25, 51.25, 3.0]
    return tuple(given.to(device, dtype) for given in (points, torch.tensor(size), torch.tensor(extent)))


def _case(
    op: str,
    name: str,
    make: Callable[..., tuple[Tensor, ...]],
    function: Callable[..., Any],
    reference: Callable[..., Any],
    numbers: int,  # read and written, 4 bytes each
    flops: int,
    **sizes: int,
) -> Case:
    return Case(
        op=op,
        name=name,
        sizes=" ".join(f"{letter}{size}" for letter, size in sizes.items()),
        make=partial(make, **sizes),
        function=function,
        reference=reference,
        differentiable={},
        work=lambda dtype: {"forward": Work(moved=numbers * 4, flops=flops)},
        tolerance=lambda dtype: {"output": 0.0},
        peers=(peer_of("torch", reference),),
        dtypes=(torch.float32,),
        batched=(0,),
    )


def _part(name: str, B: int, N: int, M: int) -> Case:
    return _case(
        *("points_in_boxes_part", name, _boxes, ops.points_in_boxes_part, points_in_boxes_part_reference),
        *(B * (4 * N + 7 * M), 20 * B * N * M),
        **dict(B=B, N=N, M=M),
    )


def _all(name: str, B: int, N: int, M: int) -> Case:
    return _case(
        *("points_in_boxes_all", name, _boxes, ops.points_in_boxes_all, points_in_boxes_all_reference),
        *(B * (3 * N + 7 * M + N * M), 20 * B * N * M),
        **dict(B=B, N=N, M=M),
    )


def _inside(name: str, N: int, M: int) -> Case:
    return _case(
        *("points_in_polygons", name, _polygons, ops.points_in_polygons, points_in_polygons_reference),
        *(2 * N + 8 * M + N * M, 40 * N * M),
        **dict(N=N, M=M),
    )


def _voxelized(name: str, N: int) -> Case:
    return _case(
        *("dynamic_voxelize", name, _voxels, ops.dynamic_voxelize, dynamic_voxelize_reference),
        *(6 * N, 12 * N),
        N=N,
    )


CASES = [
    _part("tiny", 2, 300, 8),
    _part("lidar", 2, 16384, 40),
    _all("tiny", 2, 300, 8),
    _all("lidar", 2, 16384, 40),
    _inside("tiny", 300, 8),
    _inside("rotated", 21824, 64),
    _voxelized("tiny", 300),
    _voxelized("nuscenes", 260000),
]
