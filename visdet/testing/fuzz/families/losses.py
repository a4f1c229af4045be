"""Problems of sigmoid_focal_loss, softmax_focal_loss and corner_pool."""

import torch
from torch import Tensor

from visdet.ops import corner_pool, sigmoid_focal_loss, softmax_focal_loss
from visdet.ops.focal_loss import sigmoid_focal_loss_reference

from ..problem import Draw, Family, Problem
from .attention import largest, wide_of

__all__ = ["FAMILIES"]


def _loss(draw: Draw, lowest: int, highest: int) -> Problem:
    N, C = draw.size(50), draw.pick(1, 2, 3, 7, 20, 80, 81)
    if draw.is_big:
        N, C = draw.pick(3000, 20000), 80
    dtype = draw.dtype()
    target = draw.whole(lowest, C + highest, N)
    weight = (
        draw.place(draw.with_bad_numbers(draw.uniform(0, 2, C), 0.2), dtype) if draw.chance(0.3) else None
    )
    arguments = {
        "input": draw.place(draw.with_bad_numbers(draw.numbers(N, C) * draw.pick(1.0, 1.0, 20.0)), dtype),
        "target": draw.place(target, can_expand=False),
        "gamma": draw.pick(2.0, 2.0, 0.0, 1.0, 1.5),
        "alpha": draw.pick(0.25, 0.5, 1.0),
        "weight": weight,
        "reduction": draw.pick("none", "mean", "sum"),
    }
    outside = bool(((target < lowest) | (target >= C)).any()) and highest == 1 and lowest < 0
    return Problem(
        arguments,
        differentiable=("input",),
        wide=wide_of(dtype),
        error_factor=256.0 + (N if arguments["reduction"] != "none" else 0),
        may_refuse="a target is no class" if outside else "",
    )


def _draw_sigmoid(draw: Draw) -> Problem:
    return _loss(draw, -2 if draw.chance(0.1) else 0, 3 if draw.chance(0.1) else 1)


def _draw_softmax(draw: Draw) -> Problem:
    return _loss(draw, -1, 1 if draw.chance(0.01) else 0)


def _reduced(loss: Tensor, rows: int, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / rows if reduction == "mean" else loss.sum()


def _sigmoid(
    input: Tensor, target: Tensor, gamma: float, alpha: float, weight: Tensor | None, reduction: str
) -> Tensor:
    weight = input.new_empty(0) if weight is None else weight
    return _reduced(sigmoid_focal_loss_reference(input, target, weight, gamma, alpha), len(input), reduction)


def _softmax(
    input: Tensor, target: Tensor, gamma: float, alpha: float, weight: Tensor | None, reduction: str
) -> Tensor:
    is_class = (target >= 0) & (target < input.shape[1])
    index = torch.where(is_class, target, 0)
    log_p = input.log_softmax(1).gather(1, index[:, None]).squeeze(1)
    loss = -alpha * (-log_p.expm1()).pow(gamma) * log_p
    if weight is not None:
        loss = loss * weight[index]
    loss = torch.where(is_class, loss, torch.where(target < 0, 0.0, torch.nan))
    return _reduced(loss, len(input), reduction)


def _loss_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    given = problem.arguments
    factor = 1.0 if given["weight"] is None else max(1.0, largest(given["weight"]))
    bounds["output"] = (2 + 2 * largest(given["input"])) * factor
    if given["reduction"] == "sum":
        bounds["output"] *= max(1, given["input"].numel())
    elif given["reduction"] == "mean":
        bounds["output"] *= max(1, given["input"].shape[1])
    if "input" in bounds:
        share = 1.0 if given["reduction"] != "mean" else 1 / max(1, len(given["input"]))
        gradient = bounds.get("grad_peak", 0.0)
        bounds["input"] = 8 * (1 + largest(given["input"])) * factor * share * gradient


def _draw_corners(draw: Draw) -> Problem:
    x = draw.numbers(draw.size(3), draw.size(8), draw.size(20), draw.size(20))
    x = draw.place(draw.with_bad_numbers(x), draw.dtype())
    return Problem(
        {"x": x, "mode": draw.pick("top", "bottom", "left", "right")},
        differentiable=("x",),
        positions=("x",),  # Numbers are only compared with each other, so that bad numbers are defined, too.
        wide=x.dtype,
        error_factor=40.0,
    )


FAMILIES = (
    Family(
        "sigmoid_focal_loss",
        sigmoid_focal_loss,
        _draw_sigmoid,
        _sigmoid,
        _loss_bounds,
        spoiled={"input": ("rank", 0), "target": ("rank", "type", 0)},
    ),
    Family(
        "softmax_focal_loss",
        softmax_focal_loss,
        _draw_softmax,
        _softmax,
        _loss_bounds,
        spoiled={"input": ("rank", 0), "target": ("rank", "type", 0)},
    ),
    Family("corner_pool", corner_pool, _draw_corners, corner_pool),
)
