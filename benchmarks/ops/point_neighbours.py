"""Cases of furthest point sampling and of the searches of neighbours, with the sizes of VoteNet."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.furthest_point_sample import furthest_point_sample_reference
from visdet.ops.point_neighbours import ball_query_reference, knn_reference

from ..case import Case, Work, peer_of, seeded

__all__ = ["CASES"]


def _clouds(
    dtype: torch.dtype, device: torch.device, *, B: int, N: int, M: int | None = None
) -> tuple[Any, ...]:
    """Return points, and M centers, of a grid so coarse that their distances are not rounded."""
    generator = seeded()
    counts = (N,) if M is None else (N, M)
    clouds = [torch.randint(0, 512, (B, count, 3), generator=generator) / 64 for count in counts]
    return tuple(cloud.to(device, dtype) for cloud in clouds)


def _work(outputs: int, numbers: int, dtype: torch.dtype) -> dict[str, Work]:
    """Return the bytes of the points and the results."""
    return {"forward": Work(moved=numbers * dtype.itemsize + 4 * outputs)}


def _case(
    op: str, name: str, function: Callable[..., Tensor], reference: Callable[..., Tensor], **sizes: int
) -> Case:
    count, heavy = sizes.pop("count"), bool(sizes.pop("heavy", 0))
    B, N, M = sizes["B"], sizes["N"], sizes.get("M", count)
    outputs = B * count if op.startswith("furthest") else B * M * count
    return Case(
        op=op,
        name=name,
        sizes=" ".join(f"{key}{value}" for key, value in sizes.items()) + f", {count} each",
        make=partial(_clouds, **sizes),
        function=function,
        reference=reference,
        differentiable={},
        work=partial(_work, outputs, 3 * B * (N + sizes.get("M", 0))),
        tolerance=lambda dtype: {"output": 0.0},
        peers=(peer_of("torch", reference),),
        dtypes=(torch.float32,),
        batched=(0, 1) if "M" in sizes else (0,),
        heavy=heavy,
    )


def _sampling(name: str, count: int, **sizes: int) -> Case:
    return _case(
        "furthest_point_sample",
        name,
        lambda points: ops.furthest_point_sample(points, count),
        lambda points: furthest_point_sample_reference(points, count, False),
        count=count,
        **sizes,
    )


def _balls(name: str, radius: float, count: int, **sizes: int) -> Case:
    return _case(
        "ball_query",
        name,
        lambda points, centers: ops.ball_query(0, radius, count, points, centers),
        lambda points, centers: ball_query_reference(points, centers, 0.0, radius**2, count, False),
        count=count,
        **sizes,
    )


def _nearest(name: str, count: int, **sizes: int) -> Case:
    return _case(
        "knn",
        name,
        lambda points, centers: ops.knn(count, points, centers)[0],
        lambda points, centers: knn_reference(points, centers, count)[0],
        count=count,
        **sizes,
    )


CASES = [
    _sampling("tiny", 256, B=2, N=1024),
    _sampling("votenet", 2048, B=8, N=20000, heavy=1),
    _balls("tiny", 0.4, 16, B=2, N=1024, M=256),
    _balls("votenet", 0.2, 64, B=8, N=20000, M=2048, heavy=1),
    _nearest("three-tiny", 3, B=2, N=256, M=1024),
    _nearest("three-votenet", 3, B=8, N=1024, M=2048),
]
