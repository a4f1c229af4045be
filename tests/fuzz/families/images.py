"""Problems of sample_sum, sample_dot and point_sample, which sample images bilinearly."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import HALVES, Draw, Operator, Problem, largest, rand, wide_of
from visdet.ops import point_sample, sample_dot, sample_dot_reference, sample_sum, sample_sum_reference

from .attention import gradient_sum, near_whole, row_sum

__all__ = ["OPERATORS"]


def _images(draw: Draw, C: int, big: bool) -> Tensor:
    B = draw.size(3)
    H, W = (draw.size(64, 0), draw.size(128, 0)) if big else (draw.size(14, 0.01), draw.size(14, 0.01))
    images = draw.numbers(B, C, H, W)
    images = draw.place(draw.with_bad_numbers(images), draw.dtype())
    return images.contiguous(memory_format=torch.channels_last) if draw.chance(0.2) else images


def _samples(draw: Draw, images: Tensor, Q: int, D: int) -> Tensor:
    B, _, H, W = images.shape
    kind = draw.random.random()
    if kind < 0.6:
        samples = draw.uniform(-1.2, 1.2, B, Q, D, 2)
    elif kind < 0.75:
        size = torch.tensor([max(W, 1), max(H, 1)], dtype=torch.float64)
        samples = (draw.uniform(-1.3, 1.3, B, Q, D, 2) * size).round() / size  # borders and centres of pixels
    elif kind < 0.85:
        samples = draw.uniform(-1, 1, 1, 1, 1, 2) + draw.uniform(0, 1e-3, B, Q, D, 2)
    else:
        samples = draw.numbers(B, Q, D, 2)
    wide = wide_of(images.dtype)
    types = (wide, wide, torch.float64, *HALVES)
    samples = draw.place(draw.with_bad_numbers(samples), draw.dtype(*types), not draw.has_bad_numbers)
    draw.leave_out(samples, _near(images, samples))
    return samples


def _near(images: Tensor, samples: Tensor) -> Tensor:
    size = torch.tensor(images.shape[:1:-1], device=samples.device)
    return near_whole((samples.detach().to(wide_of(images.dtype)).double() + 1) / 2, size)


def _sizes(draw: Draw, big: bool) -> tuple[int, int, int, int]:
    """Return C, G, Q and D."""
    if big:
        Q, D = draw.pick((64, 31), (256, 123), (900, 13)) if draw.device == "cuda" else (32, 31)
        return draw.pick(140, 64, 30, 256), draw.pick(1, 4, 8), Q, D
    C = draw.pick(1, 2, 3, 4, 5, 8, 13, 16, 30, 64, 71) if draw.chance(0.95) else draw.pick(0, 140, 1025)
    return C, draw.size(9), draw.size(12), draw.size(12)


def _problem(arguments: dict, constants: dict, may_refuse: str = "") -> Problem:
    images, samples = arguments["images"], arguments["samples"]
    is_empty = images.shape[2] * images.shape[3] == 0
    return Problem(
        {**arguments, **constants},
        differentiable=tuple(arguments),
        positions=("samples",),
        wide=wide_of(images.dtype),
        error_factor=64.0 + 16 * max(images.shape[2:]) + 0.5 * samples.shape[1] * samples.shape[2],
        skip={"samples": _near(images, samples)},
        may_refuse="images have no pixels" if is_empty else may_refuse,
    )


def _draw_sum(draw: Draw) -> Problem:
    big = draw.is_big
    C, G, Q, D = _sizes(draw, big)
    images = _images(draw, C, big)
    samples = _samples(draw, images, Q, D)
    wide = wide_of(images.dtype)
    weights = draw.place(
        draw.with_bad_numbers(draw.numbers(len(images), G, Q, D)), draw.dtype(wide, wide, *HALVES)
    )
    return _problem({"images": images, "samples": samples, "weights": weights}, {})


def _draw_dot(draw: Draw) -> Problem:
    big = draw.is_big
    C, G, Q, D = _sizes(draw, big)
    octaves = draw.pick(0, 0, 1, 2, 6, 12, 28, 30)
    octaves = octaves if draw.chance(0.1) else min(octaves, C // 2)
    images = _images(draw, C, big)
    samples = _samples(draw, images, Q, D)
    wide = wide_of(images.dtype)
    queries = draw.numbers(len(images), G, Q, max(C - 2 * octaves, 0))
    queries = draw.place(draw.with_bad_numbers(queries), draw.dtype(wide, wide, *HALVES))
    depths = draw.place(
        draw.with_bad_numbers(draw.uniform(-4, 4, len(images), Q, D)), draw.dtype(wide, wide, *HALVES)
    )
    return _problem(
        {"images": images, "samples": samples, "queries": queries, "depths": depths},
        {"num_octaves": octaves},
        may_refuse="the octaves take more channels than there are" if 2 * octaves > C else "",
    )


def _sum_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    images, weights = problem.arguments["images"], problem.arguments["weights"]
    peak = largest(images)
    bounds["output"] = peak * row_sum(weights, 1)
    groups = max(1, weights.shape[1])
    if "images" in bounds:  # All of the gradient of a pixel at the border may come from rounding.
        bounds["images"] += groups * largest(weights) * bounds.get("grad_peak", 0.0)
    if "weights" in bounds:
        bounds["weights"] = peak * gradient_sum(bounds)
    if "samples" in bounds:
        bounds["samples"] = (
            4 * max(images.shape[2:]) * peak * largest(weights) * gradient_sum(bounds) * groups
        )


def _dot_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    images, queries = problem.arguments["images"], problem.arguments["queries"]
    octaves = problem.arguments["num_octaves"]
    peak, groups = largest(images), max(1, queries.shape[1])
    # The error of the reference's angles, in float64, is its epsilon times their size.
    angle = 2 * math.pi * 2**octaves * largest(problem.arguments["depths"])
    angle *= torch.finfo(torch.float64).eps / torch.finfo(problem.wide).eps
    row = row_sum(queries, 1) + 2 * octaves * (1 + angle)  # of a query and its encoding
    bounds["output"] = peak * row
    gradient = bounds.get("grad_output", 0.0)
    for name, bound in (
        ("images", bounds.get("images", 0.0) + (1 + angle) * gradient * groups * max(1, queries.shape[2])),
        ("queries", peak * gradient),
        ("samples", 4 * max(images.shape[2:]) * peak * row * gradient * groups),
        ("depths", 4 * math.pi * 2**octaves * (1 + angle) * peak * gradient * groups * max(1, octaves)),
    ):
        if name in bounds:
            bounds[name] = bound


def _draw_points(draw: Draw) -> Problem:
    C, _, Q, D = _sizes(draw, draw.is_big)
    images = _images(draw, C, False)
    shape = (len(images), Q, 2) if draw.chance(0.5) else (len(images), Q, D, 2)
    points = draw.with_bad_numbers(draw.uniform(-0.2, 1.2, *shape))
    points = draw.place(points, images.dtype, not draw.has_bad_numbers)
    draw.leave_out(points, _near(images, points * 2 - 1), -9.0)
    settings = {
        "align_corners": draw.chance(0.3),
        "mode": draw.pick("bilinear", "bilinear", "bilinear", "nearest"),
        "padding_mode": draw.pick("zeros", "zeros", "border", "reflection"),
    }
    usual = settings["mode"] == "bilinear" and not settings["align_corners"]
    exact = images.dtype in (torch.float32, torch.float64)
    near = _near(images, points * 2 - 1)
    has_bad = not bool((points.isfinite() & (points.abs() < 1e3)).all())
    unsure = has_bad or not usual or not exact or bool(near.any())
    if unsure and settings["mode"] == "nearest":
        exact = False
    return Problem(
        {"input": images, "points": points, **settings},
        differentiable=("input", "points"),
        wide=images.dtype,
        error_factor=64.0 + 16 * max(images.shape[2:]) + 0.5 * points[..., 0].numel(),
        skip={
            "points": unsure or settings["padding_mode"] != "zeros",
            "output": settings["mode"] == "nearest" or has_bad or not exact,
            "input": settings["mode"] == "nearest" or has_bad or not exact,
        },
        may_refuse="images have no pixels" if images.numel() == 0 else "",
    )


def _points_reference(input: Tensor, points: Tensor, **settings: Any) -> Tensor:
    grid = torch.where(points.isfinite() & (points.abs() < 1e3), points, -9.0) * 2 - 1
    if 0 in input.shape[2:]:  # grid_sample refuses such an image.
        nothing = input.sum() + grid.flatten()[:0].sum()
        return input.new_zeros(*input.shape[:2], *points.shape[1:-1]) + nothing
    if grid.dim() == 3:
        return F.grid_sample(input, grid[:, :, None], **settings).squeeze(3)
    return F.grid_sample(input, grid, **settings)


def _points_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    images = problem.arguments["input"]
    bounds["output"] = 2 * largest(images)
    if "points" in bounds:
        gradient = bounds.get("grad_output", 0.0) * max(1, images.shape[1])
        bounds["points"] = 8 * max(images.shape[2:]) * largest(images) * gradient
    if "input" in bounds:
        bounds["input"] = bounds.get("grad_output", 0.0) * problem.error_factor


@st.composite
def _launches_of_sample_sum(draw: st.DrawFn) -> dict[str, Any]:
    B, C, H, W = draw(st.integers(0, 3)), draw(sizes.channels), draw(sizes.side), draw(sizes.side)
    Q, D, G, dtype = draw(sizes.count), draw(sizes.count), draw(st.integers(0, 9)), draw(sizes.value_types)
    return {
        "images": sizes.empty(B, C, H, W, dtype=dtype),
        "samples": sizes.empty(B, Q, D, 2, dtype=wide_of(dtype)),
        "weights": sizes.empty(B, G, Q, D, dtype=wide_of(dtype)),
    }


@st.composite
def _launches_of_sample_dot(draw: st.DrawFn) -> dict[str, Any]:
    B, C, H, W = draw(st.integers(0, 3)), draw(sizes.channels), draw(sizes.side), draw(sizes.side)
    Q, D, G, dtype = draw(sizes.count), draw(sizes.count), draw(st.integers(0, 9)), draw(sizes.value_types)
    octaves = draw(st.one_of(st.integers(0, 6), st.sampled_from([12, 28, 40, 100]))) if C else 0
    octaves = min(octaves, C // 2)
    return {
        "images": sizes.empty(B, C, H, W, dtype=dtype),
        "samples": sizes.empty(B, Q, D, 2, dtype=wide_of(dtype)),
        "queries": sizes.empty(B, G, Q, C - 2 * octaves, dtype=wide_of(dtype)),
        "depths": sizes.empty(B, Q, D, dtype=wide_of(dtype)),
        "num_octaves": octaves,
    }


OPERATORS = (
    Operator(
        "sample_sum",
        sample_sum,
        _draw_sum,
        sample_sum_reference,
        _sum_bounds,
        reads_beside=("images",),
        spoiled={
            "images": ("rank", "type", 0),
            "samples": ("rank", "device", 0, 1, 2, 3),
            "weights": ("rank", "device", 0, 2, 3),
        },
        of_size=(
            lambda n: Problem(
                {"images": rand(2, 4, 5, 6), "samples": rand(2, n, 3, 2), "weights": rand(2, 2, n, 3)},
                ("images", "samples", "weights"),
            ),
        ),
        launches=_launches_of_sample_sum,
    ),
    Operator(
        "sample_dot",
        sample_dot,
        _draw_dot,
        sample_dot_reference,
        _dot_bounds,
        reads_beside=("images",),
        spoiled={
            "images": ("rank", "type", 0, 1),
            "samples": ("rank", "device", 0, 1, 2, 3),
            "queries": ("rank", "device", 0, 2, 3),
            "depths": ("rank", "device", 0, 1, 2),
        },
        of_size=(
            lambda n: Problem(
                {
                    "images": rand(2, 4, 5, 6),
                    "samples": rand(2, n, 3, 2),
                    "queries": rand(2, 2, n, 2),
                    "depths": rand(2, n, 3),
                    "num_octaves": 1,
                },
                ("images", "samples", "queries", "depths"),
            ),
        ),
        launches=_launches_of_sample_dot,
    ),
    Operator("point_sample", point_sample, _draw_points, _points_reference, _points_bounds),
)
