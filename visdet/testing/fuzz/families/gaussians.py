"""Problems of mahalanobis_distance and gaussian_field."""

import math

import torch
from torch import Tensor

from visdet.ops import (
    gaussian_field,
    gaussian_field_reference,
    mahalanobis_distance,
    mahalanobis_distance_reference,
)

from ..problem import Draw, Family, Problem
from .attention import HALVES, largest, wide_of

__all__ = ["FAMILIES"]


def _gaussians(draw: Draw) -> tuple[dict[str, Tensor], str]:
    """Return points, means and factors, and the reason for which they may be refused."""
    if draw.is_big:
        B, N = draw.pick((5000, 300), (100, 5000), (1025, 1000)) if draw.device == "cuda" else (300, 200)
    else:
        B, N = draw.size(70), draw.size(70)
    points, means = draw.numbers(B, 3), draw.numbers(N, 3)
    factors = draw.uniform(-0.5, 0.5, N, 3, 3)
    factors.diagonal(0, 1, 2).copy_(draw.uniform(0.2, 2.0, N, 3))
    if draw.chance(0.2):
        factors = factors * draw.pick(0.05, 30.0)
    refusal = ""
    factors = draw.with_bad_numbers(factors, 0.2)
    if N and draw.chance(0.03):
        factors[draw.random.randrange(N), 1, 1] = draw.pick(0.0, -1.0, torch.nan)
    dtype = draw.dtype()
    wide = wide_of(dtype)
    placed = {
        "points": draw.place(draw.with_bad_numbers(points), dtype),
        "means": draw.place(draw.with_bad_numbers(means), draw.dtype(wide, wide, *HALVES)),
        "cholesky": draw.place(factors, draw.dtype(wide, wide, wide, *HALVES)),
    }
    if not bool((placed["cholesky"].to(wide).diagonal(0, 1, 2) > 0).all()):
        refusal = "a diagonal is not positive"
    return placed, refusal


def _problem(tensors: dict[str, Tensor], constants: dict, refusal: str) -> Problem:
    return Problem(
        {**tensors, **constants},
        differentiable=tuple(tensors),
        wide=wide_of(tensors["points"].dtype),
        error_factor=256.0 + len(tensors["points"]) + len(tensors["means"]),
        may_refuse=refusal,
    )


def _draw_distance(draw: Draw) -> Problem:
    tensors, refusal = _gaussians(draw)
    problem = _problem(tensors, {}, refusal)
    if refusal:  # On CUDA, distances and gradients are NaN then.
        problem.skip = dict.fromkeys(tensors, True)
    return problem


def _draw_field(draw: Draw) -> Problem:
    tensors, refusal = _gaussians(draw)
    N, wide = len(tensors["means"]), wide_of(tensors["points"].dtype)
    tensors["weights"] = draw.place(draw.with_bad_numbers(draw.numbers(N)), draw.dtype(wide, wide, *HALVES))
    tolerance = draw.pick(0.0, 0.0, 0.0, 1e-3, 1e-6)
    problem = _problem(tensors, {"tolerance": tolerance}, refusal)
    if tolerance:  # The gradients are those of the terms that were added.
        problem.absolute["output"] = 1.01 * tolerance
        problem.skip = dict.fromkeys(tensors, True)
    return problem


def _positive(cholesky: Tensor) -> Tensor:
    """Return the factors, with NaN for those whose diagonal is not positive."""
    is_right = (cholesky.diagonal(0, 1, 2) > 0).all(1)[:, None, None]
    return cholesky.tril() + torch.where(is_right, 0.0, torch.nan)


def _distance(points: Tensor, means: Tensor, cholesky: Tensor) -> Tensor:
    return mahalanobis_distance_reference(points, means, _positive(cholesky))


def _field(points: Tensor, means: Tensor, cholesky: Tensor, weights: Tensor, tolerance: float) -> Tensor:
    return gaussian_field_reference(points, means, _positive(cholesky), weights)


def _scales(problem: Problem) -> tuple[float, float]:
    """Return bounds of the entries of an inverse factor and of |v|."""
    given = problem.arguments
    factors = given["cholesky"].detach().double().tril()
    diagonal = factors.diagonal(0, 1, 2)
    usable = (factors.isfinite() & (factors.abs() < 1e4)).flatten(1).all(1) & (diagonal > 0).all(1)
    factors = factors[usable]
    if len(factors) == 0:
        return 1.0, 1.0
    ones = torch.eye(3, dtype=factors.dtype, device=factors.device).expand_as(factors)
    inverse = torch.linalg.solve_triangular(factors, ones, upper=False)
    # The product of the magnitudes bounds the cancellation inside the solve.
    growth = (inverse.abs() @ factors.abs() @ inverse.abs()).flatten(1).sum(1).max()
    reach = largest(given["points"]) + largest(given["means"])
    return float(growth), float(growth) * max(reach, 1e-30)


def _distance_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    inverse, v = _scales(problem)
    if v * v > torch.finfo(problem.wide).max:  # distances are infinite, and a gradient of 0 times one is NaN
        bounds.update(dict.fromkeys(bounds, math.inf))
        return
    gradient = bounds.get("grad_total", 0.0)
    bounds["output"] = v * v
    for name, bound in (("points", inverse * v), ("means", inverse * v), ("cholesky", inverse * v * v)):
        if name in bounds:
            bounds[name] = 2 * gradient * bound


def _field_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    inverse, v = _scales(problem)
    weights = problem.arguments["weights"]
    total = largest(weights) * max(1, len(weights))
    gradient = bounds.get("grad_total", 0.0)
    bounds["output"] = total * (1 + v)
    for name, bound in (
        ("points", gradient * total * inverse * (1 + v)),
        ("means", gradient * largest(weights) * inverse * (1 + v)),
        ("cholesky", gradient * largest(weights) * inverse * (1 + v) * (1 + v)),
        ("weights", gradient * (1 + v)),
    ):
        if name in bounds:
            bounds[name] = bound


FAMILIES = (
    Family(
        "mahalanobis_distance",
        mahalanobis_distance,
        _draw_distance,
        _distance,
        _distance_bounds,
        spoiled={
            "points": ("rank", "type", 1),
            "means": ("rank", "device", 0, 1),
            "cholesky": ("device", 0, 1, 2),
        },
    ),
    Family(
        "gaussian_field",
        gaussian_field,
        _draw_field,
        _field,
        _field_bounds,
        spoiled={
            "points": ("rank", "type", 1),
            "means": ("rank", "device", 0, 1),
            "cholesky": ("device", 0, 1, 2),
            "weights": ("rank", "device", 0),
        },
    ),
)
