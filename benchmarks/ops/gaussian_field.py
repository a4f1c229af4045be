"""Cases of gaussian_field, with the sizes of a training step, sizes for a CPU, and 10^9 pairs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from visdet.ops import gaussian_field, gaussian_field_reference

from ..case import Case, Work, peer_of, seeded

# Number of points that the gate's reference computes at once. With 10^4 Gaussians, a tensor then takes half a gigabyte.
CHUNK = 2000


def make_arguments(
    dtype: torch.dtype, device: torch.device, *, B: int, N: int, size: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return points and means that are uniform in the unit cube, factors of about ``size``, and weights."""
    generator = seeded()
    points = torch.rand(B, 3, generator=generator)
    means = torch.rand(N, 3, generator=generator)
    lower = 0.3 * size * torch.randn(N, 3, 3, generator=generator)
    diagonal = size * (0.5 + torch.rand(N, 3, generator=generator))
    cholesky = lower.tril(-1) + torch.diag_embed(diagonal)
    weights = torch.randn(N, generator=generator)
    return tuple(tensor.to(device, dtype) for tensor in (points, means, cholesky, weights))


def work_of(dtype: torch.dtype, *, B: int, N: int, size: float) -> dict[str, Work]:
    """Return the bytes of forward and backward."""
    moved = (B * 4 + N * 13) * dtype.itemsize
    return {"forward": Work(moved=moved), "backward": Work(moved=2 * moved)}


def vectorised_path(points: Tensor, means: Tensor, cholesky: Tensor, weights: Tensor) -> Tensor:
    """Return the field in plain torch, which inverts the factors once and then computes all [B, N, 3] at once."""
    difference = points[:, None] - means
    v = torch.einsum("nij,bnj->bni", torch.linalg.inv(cholesky), difference)
    return torch.exp(-0.5 * v.square().sum(-1)) @ weights


def chunked_reference(points: Tensor, means: Tensor, cholesky: Tensor, weights: Tensor) -> Tensor:
    """Return the field by its definition for a few points at a time, which are recomputed in the backward."""
    chunks = [
        checkpoint(gaussian_field_reference, chunk, means, cholesky, weights, use_reentrant=False)
        for chunk in points.split(CHUNK)
    ]
    return torch.cat(chunks)


def _case(name: str, B: int, N: int, size: float = 0.1, **others: Any) -> Case:
    numbers = dict(B=B, N=N, size=size)
    return Case(
        op="gaussian_field",
        name=name,
        sizes=f"B{B} N{N}, Gaussians of about {size:g} in the unit cube",
        make=partial(make_arguments, **numbers),
        function=others.pop("function", gaussian_field),
        reference=chunked_reference,
        differentiable={"points": 0, "means": 1, "cholesky": 2, "weights": 3},
        work=partial(work_of, **numbers),
        tolerance=lambda dtype: dict.fromkeys(("output", "points", "means", "cholesky", "weights"), 5e-5),
        peers=(peer_of("torch", vectorised_path, (0, 1, 2, 3)),),
        dtypes=(torch.float32,),
        **others,
    )


CASES = [
    _case("tiny", B=40, N=30),
    _case(
        "step",
        B=500,
        N=1000,
        graph=True,
    ),
    _case("small", B=5000, N=1000),
    _case(
        "pairs-1e9",
        B=100_000,
        N=10_000,
        heavy=True,
    ),
]
