"""Cases of the operators on point sets, with the sizes of mmrotate's RepPoints on images of 1024 x 1024 pixels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.mmcv.point_sets import (
    convex_giou_reference,
    convex_iou_reference,
    min_area_polygons_reference,
)

from ..case import Case, Work, peer_of

__all__ = ["CASES"]


def _inputs(dtype: torch.dtype, device: torch.device, *, N: int, K: int) -> tuple[Tensor, ...]:
    """Return point sets of up to 64 pixels and, unless K is 0, rotated boxes around the first points of K of them."""
    generator = torch.Generator().manual_seed(0)
    points = 1024 * torch.rand(N, 1, 2, generator=generator) + 64 * torch.rand(N, 9, 2, generator=generator)
    sides, angle = 4 + 60 * torch.rand(K, 1, 2, generator=generator), 7 * torch.rand(K, generator=generator)
    corners = torch.tensor([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]]) * sides
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], 1).view(K, 2, 2)
    polygons = points[:K, :1] + corners @ turn
    given = (points, polygons) if K else (points,)
    return tuple(one.flatten(1).to(device, dtype) for one in given)


def _work(dtype: torch.dtype, N: int, K: int, outputs: int, flops: int) -> dict[str, Work]:
    return {"forward": Work(moved=(18 * N + 8 * K + outputs) * dtype.itemsize, flops=flops)}


def _case(
    op: str,
    name: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    outputs: int,
    flops: int,
    N: int,
    K: int = 0,
) -> Case:
    return Case(
        op=op,
        name=name,
        sizes=f"N{N}" + (f" K{K}" if K else ""),
        make=partial(_inputs, N=N, K=K),
        function=function,
        reference=reference,
        differentiable={},
        work=partial(_work, N=N, K=K, outputs=outputs, flops=flops),
        tolerance=lambda dtype: {"output": 1e-5},
        peers=(peer_of("torch", reference),),
        dtypes=(torch.float32,),
        batched=(0, 1) if op == "convex_giou" else (0,),
    )


def _least(name: str, N: int) -> Case:
    # A hull of six corners compares 81 pairs of points for each.
    return _case(
        *("min_area_polygons", name, ops.min_area_polygons, min_area_polygons_reference),
        *(8 * N, 3000 * N, N),
    )


def _iou(name: str, N: int, K: int) -> Case:
    # For each of two triangles, an edge takes some 40 operations.
    return _case(
        *("convex_iou", name, ops.convex_iou, convex_iou_reference),
        *(N * K, 3000 * N + 720 * N * K, N, K),
    )


def _giou(name: str, N: int) -> Case:
    return _case(
        "convex_giou",
        name,
        lambda points, polygons: torch.cat(
            [one.view(len(one), -1) for one in ops.convex_giou(points, polygons)], 1
        ),
        lambda points, polygons: torch.cat(
            [one.view(len(one), -1) for one in convex_giou_reference(points, polygons)], 1
        ),
        *(19 * N, 50000 * N, N, N),
    )


CASES = [
    _least("tiny", 300),
    _least("reppoints", 21824),
    _iou("tiny", 300, 8),
    _iou("reppoints", 21824, 64),
    _giou("tiny", 50),
    _giou("reppoints", 1000),
]
