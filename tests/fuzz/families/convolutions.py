"""Problems of deform_conv2d, modulated_deform_conv2d, masked_conv2d and carafe."""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import HALVES, Draw, Operator, Problem, largest, rand, wide_of
from visdet.ops import carafe, deform_conv2d, masked_conv2d, modulated_deform_conv2d
from visdet.ops.carafe import carafe_reference
from visdet.ops.deform_conv2d import deform_conv2d_reference

from .attention import NEAR

__all__ = ["OPERATORS"]


def _deformed(draw: Draw, modulated: bool) -> Problem:
    groups = draw.pick(1, 1, 1, 2, 3)
    deform_groups = draw.pick(1, 1, 2, 4)
    per = draw.pick(1, 2, 3, 5, 8)
    C, out_channels = groups * deform_groups * per, groups * draw.pick(1, 2, 3, 8, 17)
    B, H, W = draw.size(3), draw.size(14, 0), draw.size(14, 0)
    if draw.is_big:
        C, out_channels, H, W = 64 * groups * deform_groups // draw.pick(1, 2), 32 * groups, 17, 23
        C = C // (groups * deform_groups) * groups * deform_groups
    kernel = (draw.pick(1, 2, 3, 3), draw.pick(1, 3, 3, 5))
    stride, dilation, padding = ((draw.pick(1, 1, 2), draw.pick(1, 1, 3)) for _ in range(3))
    padding = (draw.pick(0, 1, 2), draw.pick(0, 1, 2))
    spans = [d * (k - 1) + 1 - 2 * p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    H, W = max(H, spans[0], 1), max(W, spans[1], 1)
    size = [(s - span) // step + 1 for s, span, step in zip((H, W), spans, stride, strict=True)]
    taps = kernel[0] * kernel[1]
    dtype = draw.dtype()
    offset = draw.numbers(B, deform_groups * 2 * taps, *size) * draw.pick(1.0, 3.0)
    offset = offset.round() if draw.chance(0.15) else offset
    tensors = {
        "input": draw.with_bad_numbers(draw.numbers(B, C, H, W)),
        "offset": draw.with_bad_numbers(offset),
        "weight": draw.with_bad_numbers(draw.numbers(out_channels, C // groups, *kernel)),
    }
    if modulated:
        tensors["mask"] = draw.with_bad_numbers(draw.uniform(-0.2, 1.0, B, deform_groups * taps, *size))
        tensors["bias"] = draw.numbers(out_channels)
    arguments: dict[str, Any] = {
        name: draw.place(tensor, dtype, name != "offset" or not draw.has_bad_numbers)
        for name, tensor in tensors.items()
    }
    if modulated and draw.chance(0.3):
        arguments["bias"] = None
    settings = dict(
        stride=stride, padding=padding, dilation=dilation, groups=groups, deform_groups=deform_groups
    )
    near = _near_whole(arguments["offset"])
    draw.leave_out(arguments["offset"], near)
    terms = C // groups * taps
    is_narrow = dtype in HALVES
    return Problem(
        {**arguments, **settings},
        differentiable=tuple(tensors),
        positions=("offset",),
        wide=wide_of(dtype),
        epsilon=torch.finfo(dtype).eps if is_narrow else None,  # columns are kept in the type of the tensors
        error_factor=8.0 if is_narrow else 64.0 + 16 * max(H, W) + terms + B * size[0] * size[1],
        skip={"offset": near},
    )


def _near_whole(offset: Tensor) -> Tensor:
    """Return a mask, True where an offset is so near to a whole number that its gradient may be either side's."""
    whole_parts = offset.detach().double()  # The taps of the kernel are at whole numbers.
    return (whole_parts - whole_parts.round()).abs() < NEAR


def _deformed_reference(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    deform_groups: int,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    return deform_conv2d_reference(
        input, offset, mask, weight, bias, stride, padding, dilation, deform_groups
    )


def _deformed_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    given = problem.arguments
    input, weight = given["input"], given["weight"]
    factor = largest(given["mask"]) if given.get("mask") is not None else 1.0
    bias = largest(given["bias"]) if given.get("bias") is not None else 0.0
    per_output = weight[0].numel() if len(weight) else 0
    bounds["output"] = largest(input) * largest(weight) * per_output * factor + bias
    back = bounds.get("grad_peak", 0.0) * largest(weight) * len(weight)  # the gradient of a column
    channels = input.shape[1] // given["deform_groups"]
    for name, bound in (
        ("input", max(bounds.get("input", 0.0), back * factor)),
        ("offset", 4 * back * largest(input) * channels * factor),
        ("mask", back * largest(input) * channels),
        ("weight", bounds.get("grad_total", 0.0) * largest(input) * factor),
        ("bias", bounds.get("grad_total", 0.0)),
    ):
        if name in bounds:
            bounds[name] = bound


def _draw_masked(draw: Draw) -> Problem:
    C, out_channels = draw.pick(1, 2, 3, 8, 13), draw.pick(1, 2, 5, 8)
    kernel = (draw.pick(1, 2, 3), draw.pick(1, 3, 5))
    padding = (draw.pick(0, kernel[0] // 2), draw.pick(0, kernel[1] // 2))
    H, W = draw.size(12, 0) + kernel[0] - 1, draw.size(12, 0) + kernel[1] - 1
    B, dtype = draw.size(3), draw.dtype()
    mask = draw.numbers(B, H, W)
    arguments: dict[str, Any] = {
        "features": draw.place(draw.with_bad_numbers(draw.numbers(B, C, H, W)), dtype),
        "mask": draw.place(draw.with_bad_numbers(mask), draw.dtype(dtype, torch.float32), can_expand=False),
        "weight": draw.place(draw.with_bad_numbers(draw.numbers(out_channels, C, *kernel)), dtype),
        "bias": draw.place(draw.numbers(out_channels), dtype) if draw.chance(0.7) else None,
        "padding": padding,
    }
    return Problem(
        arguments,
        differentiable=("features", "weight", "bias"),
        positions=("mask",),
        wide=wide_of(dtype),
        epsilon=torch.finfo(dtype).eps if dtype in HALVES else None,
        error_factor=16.0 if dtype in HALVES else 64.0 + C * kernel[0] * kernel[1] + B * H * W,
    )


def _masked_reference(
    features: Tensor, mask: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]
) -> Tensor:
    output = F.conv2d(features.contiguous(), weight.contiguous(), bias, padding=padding)
    is_marked = mask[:, None, : output.shape[2], : output.shape[3]] > 0
    marked = torch.zeros_like(output[:, :1], dtype=torch.bool)
    marked[:, :, : is_marked.shape[2], : is_marked.shape[3]] = is_marked
    return torch.where(marked, output, 0.0)


def _draw_carafe(draw: Draw) -> Problem:
    K, G, s = draw.pick(1, 3, 5, 5, 7), draw.pick(1, 1, 2, 3, 4), draw.pick(1, 2, 2, 3)
    C, B = G * draw.pick(1, 2, 3, 5, 8, 30), draw.size(3)
    H, W = draw.size(9, 0.01), draw.size(9, 0.01)
    if draw.is_big:
        H, W, C = 20, 27, G * 32
    dtype = draw.dtype()
    masks = draw.numbers(B, K * K * G, H * s, W * s)
    masks = draw.place(draw.with_bad_numbers(masks), draw.dtype(dtype, dtype, torch.float32))
    return Problem(
        {
            "features": draw.place(draw.with_bad_numbers(draw.numbers(B, C, H, W)), dtype),
            "masks": masks if dtype not in HALVES else masks.to(dtype),
            "kernel_size": K,
            "group_size": G,
            "scale_factor": s,
        },
        differentiable=("features", "masks"),
        wide=wide_of(dtype),
        error_factor=64.0 + K * K * s * s + C,
    )


@st.composite
def _launches_of_deform_conv2d(draw: st.DrawFn) -> dict[str, Any]:
    B, H, W = draw(st.integers(0, 3)), draw(sizes.side) + 3, draw(sizes.side) + 3
    groups, deform_groups = draw(st.sampled_from([1, 2, 32])), draw(st.sampled_from([1, 2, 4]))
    C, out = 4 * groups * draw(st.integers(1, 8)), groups * draw(st.integers(1, 8))
    dtype, k = draw(sizes.value_types), draw(st.sampled_from([1, 3]))
    return {
        "input": sizes.empty(B, C, H, W, dtype=dtype),
        "offset": sizes.empty(B, deform_groups * 2 * k * k, H, W, dtype=dtype),
        "weight": sizes.empty(out, C // groups, k, k, dtype=dtype),
        "padding": k // 2,
        "groups": groups,
        "deform_groups": deform_groups,
    }


OPERATORS = (
    Operator(
        "deform_conv2d",
        deform_conv2d,
        lambda draw: _deformed(draw, False),
        _deformed_reference,
        _deformed_bounds,
        spoiled={"input": ("rank", 0, 1), "offset": ("rank", 0, 1, 2, 3), "weight": (1, 2)},
        of_size=(
            lambda n: Problem(
                {
                    "input": rand(n, 4, 6, 7),
                    "offset": rand(n, 18, 6, 7),
                    "weight": rand(2, 4, 3, 3),
                    "padding": 1,
                },
                ("input", "offset", "weight"),
            ),
        ),
        launches=_launches_of_deform_conv2d,
    ),
    Operator(
        "modulated_deform_conv2d",
        modulated_deform_conv2d,
        lambda draw: _deformed(draw, True),
        _deformed_reference,
        _deformed_bounds,
        spoiled={"input": ("rank", 0, 1), "offset": ("rank", 0, 1, 2, 3), "mask": ("rank", 0, 1, 2, 3)},
    ),
    Operator(
        "masked_conv2d",
        masked_conv2d,
        _draw_masked,
        _masked_reference,
        spoiled={"features": ("rank", 0, 2, 3), "mask": ("rank", 0, 1, 2)},
    ),
    Operator(
        "carafe",
        carafe,
        _draw_carafe,
        carafe_reference,
        spoiled={"features": ("rank", 0, 2, 3), "masks": ("rank", 0, 1, 2, 3)},
        of_size=(
            lambda n: Problem(
                {
                    "features": rand(n, 4, 4, 5),
                    "masks": rand(n, 9, 8, 10),
                    "kernel_size": 3,
                    "group_size": 1,
                    "scale_factor": 2,
                },
                ("features", "masks"),
            ),
        ),
    ),
)
