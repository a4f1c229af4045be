"""box_key_points."""

import math

import torch

from visdet.ops import box_key_points, box_key_points_reference

from ..problem import Draw, Family, Problem
from .attention import HALVES, largest

__all__ = ["FAMILIES"]


def _draw_key_points(draw: Draw) -> Problem:
    B, Q, F, M = draw.size(3), draw.size(20), draw.size(8), draw.size(7)
    if draw.is_big:
        B, Q = 2, 900
    dtype = draw.dtype(torch.float32, torch.float64)
    anchors = draw.uniform(-2, 2, B, Q, draw.pick(8, 8, 9, 11, 12, 7 if draw.chance(0.1) else 8))
    if draw.chance(0.3):
        anchors = anchors * 6
    if draw.chance(0.3):
        logits = None
    else:
        logits = draw.place(draw.with_bad_numbers(draw.numbers(B, Q, M * 3)), draw.dtype(dtype, *HALVES))
    arguments = {
        "anchors": draw.place(draw.with_bad_numbers(anchors), dtype),
        "fixed": draw.place(draw.with_bad_numbers(draw.numbers(F, 3)), draw.dtype(dtype, *HALVES)),
        "logits": logits,
        "max_log_size": draw.pick(10.0, 10.0, 1.0, 4.5),
    }
    return Problem(
        arguments,
        differentiable=("anchors", "logits"),
        wide=dtype,
        error_factor=256.0,
        may_refuse="anchors have fewer than 8 numbers" if anchors.shape[-1] < 8 else "",
    )


def _key_points_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    given = problem.arguments
    anchors = given["anchors"].detach().double()
    sizes = torch.where(anchors.abs() < 1e4, anchors, 0.0)[..., 3:6].clamp(max=given["max_log_size"])
    size = math.exp(float(sizes.max())) if sizes.numel() else 1.0
    place = max(0.5, largest(given["fixed"])) * size * (1 + largest(given["anchors"]))
    bounds["output"] = largest(given["anchors"]) + 2 * place * max(1.0, largest(given["anchors"]))
    for name in ("anchors", "logits"):
        if name in bounds:
            bounds[name] = 4 * bounds.get("grad_total", 0.0) * max(1.0, bounds["output"])


FAMILIES = (
    Family(
        "box_key_points",
        box_key_points,
        _draw_key_points,
        box_key_points_reference,
        _key_points_bounds,
        spoiled={
            "anchors": ("rank", "type", 0, 1),
            "fixed": ("rank", "device", 1),
            "logits": ("rank", "device", 0, 1, 2),
        },
    ),
)
