"""Problems of autocast_linear."""

import torch
from torch import Tensor

from visdet.ops.fused import autocast_linear

from ..problem import Draw, Family, Problem
from .attention import HALVES
from .rounding import EXACT_STEPS, Steps, bounds_of, epsilon_of

__all__ = ["FAMILIES"]


def _draw(draw: Draw) -> Problem:
    C, D = draw.size(40), draw.pick(1, 2, 4, 7, 8, 33, 64, 80)
    rows = [draw.size(20) for _ in range(draw.pick(1, 1, 2, 3))]
    if draw.is_big:
        rows, C, D = [draw.pick(900, 2500)], draw.pick(256, 1024), draw.pick(256, 4, 91)
    dtype = draw.pick(*HALVES)
    return Problem(
        {
            "input": draw.place(
                draw.with_bad_numbers(draw.numbers(*rows, C)), draw.pick(dtype, torch.float32)
            ),
            "weight": draw.place(draw.with_bad_numbers(draw.numbers(D, C), 0.2), torch.float32),
            "bias": draw.place(draw.with_bad_numbers(draw.numbers(D), 0.2), torch.float32),
            "dtype": dtype,
        },
        differentiable=("input", "weight", "bias"),
        epsilon=epsilon_of(dtype),
    )


def _reference(
    input: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype, steps: Steps = EXACT_STEPS
) -> Tensor:
    return steps.linear(steps.disturbed(input), steps.disturbed(weight), steps.disturbed(bias))


FAMILIES = (
    Family(
        "autocast_linear",
        autocast_linear,
        _draw,
        _reference,
        bounds_of(_reference),
        spoiled={"input": (-1,), "weight": ("rank", 0, 1), "bias": ("rank", 0)},
    ),
)
