"""Cases of gathers of points' features, with the sizes of VoteNet."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.gather_points import gather_points_reference

from ..case import Case, Work, peer_of, seeded

__all__ = ["CASES"]


def _inputs(
    dtype: torch.dtype, device: torch.device, *, features: tuple[int, ...], indices: tuple[int, ...], N: int
) -> tuple[Tensor, ...]:
    """Return features, indices of N points, and for three of these each their weights."""
    generator = seeded()
    index = torch.randint(0, N, indices, generator=generator, dtype=torch.int32)
    weight = (torch.rand(indices, generator=generator).to(device, dtype),) if indices[-1] == 3 else ()
    return torch.randn(features, generator=generator).to(device, dtype), index.to(device), *weight


def _plain(features: Tensor, indices: Tensor, *weight: Tensor) -> Tensor:
    flat = indices if weight else indices.flatten(1)[..., None]
    weights = weight[0] if weight else features.new_empty(0)
    gathered = gather_points_reference(features, flat, weights, False)
    return gathered if weight else gathered.unflatten(2, indices.shape[1:])


def _gathered(op: str, name: str, B: int, C: int, N: int, *points: int) -> Case:
    sizes: dict[str, Any] = dict(features=(B, C, N), indices=(B, *points), N=N)
    outputs = B * C * (points[0] if op == "three_interpolate" else torch.Size(points).numel())
    tensors = _inputs(torch.float32, torch.device("cpu"), **sizes)
    given, K = 4 * sum(tensor.numel() for tensor in tensors), len(tensors)
    differentiable = {"features": 0} | ({"weight": 2} if K == 3 else {})
    return Case(
        op=op,
        name=name,
        sizes=" ".join("x".join(map(str, size)) for size in (sizes["features"], sizes["indices"])),
        make=partial(_inputs, **sizes),
        function=getattr(ops, op),
        reference=_plain,
        differentiable=differentiable,
        work=lambda dtype: {
            "forward": Work(moved=given + 4 * outputs),
            "backward": Work(moved=2 * given + 4 * outputs),
        },
        tolerance=lambda dtype: {"output": 1e-6, "features": 1e-5, "weight": 1e-5},
        peers=(peer_of("torch", _plain, tuple(differentiable.values())),),
        dtypes=(torch.float32,),
    )


CASES = [
    _gathered("group_points", "tiny", 2, 8, 100, 30, 5),
    _gathered("group_points", "votenet", 8, 128, 2048, 1024, 32),
    _gathered("gather_points", "tiny", 2, 3, 100, 30),
    _gathered("gather_points", "votenet", 8, 3, 20000, 2048),
    _gathered("three_interpolate", "tiny", 2, 8, 50, 30, 3),
    _gathered("three_interpolate", "votenet", 8, 256, 512, 1024, 3),
]
