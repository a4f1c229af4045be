"""Batch normalisation in training with the sum and ReLU after it: the sizes of ResNet-50 on 24 images of 256 x 704."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.ops.fused import batch_norm_add_relu

from ..case import Case, Work, peer_of, seeded

SHAPES = [
    (24, 64, 128, 352),
    (24, 256, 64, 176),
    (24, 512, 32, 88),
    (24, 1024, 16, 44),
    (24, 2048, 8, 22),
    (24, 512, 8, 22),
]


def _arguments(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> tuple[Any, ...]:
    draw = partial(torch.randn, generator=seeded())
    # The sums are far from zero, where rounding would decide between the halves of ReLU and so about whole gradients.
    maps = [draw(shape), draw(shape).sign() * 9]
    channels = [1 + draw(shape[1]).tanh() / 8, draw(shape[1]).tanh()]
    return *(one.to(device, dtype, memory_format=torch.channels_last) for one in maps), *(
        one.to(device) for one in channels
    )


def composed(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what ``batch_norm_add_relu`` returns, by torch's operators."""
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True) + residual)


def _work(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Work]:
    numbers = torch.Size(shape).numel()
    return {
        name: Work(moved=tensors * numbers * dtype.itemsize)
        for name, tensors in (("forward", 4), ("backward", 6))
    }


CASES = [
    Case(
        op="batch_norm_add_relu",
        name=f"batch_norm-C{shape[1]}-{shape[2]}x{shape[3]}",
        sizes="x".join(map(str, shape)),
        make=partial(_arguments, shape=shape),
        function=batch_norm_add_relu,
        reference=composed,
        differentiable={"x": 0, "residual": 1, "weight": 2, "bias": 3},
        work=partial(_work, shape),
        tolerance=lambda dtype: dict.fromkeys(
            ("output", "x", "residual", "weight", "bias"), 1e-3 if dtype == torch.float32 else 3e-2
        ),
        peers=(peer_of("torch", composed, (0, 1, 2, 3)),),
        dtypes=(torch.float32, torch.bfloat16),
        graph=True,
        heavy=True,
    )
    for shape in SHAPES
]
