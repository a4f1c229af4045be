"""gaussian_field and mahalanobis_distance: by hand, and against the plain-torch definition."""

import math
from typing import Any

import pytest
import torch
from calls import gradients, relative_error
from gaussian_field_cases import DEVICES, OPS, TOLERANCE, arguments_of, grad_shape, make_case
from golden import golden, under
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import HALVES, Draw, Operator, Problem, largest, rand, wide_of
from visdet.ops import (
    gaussian_field,
    gaussian_field_reference,
    mahalanobis_distance,
    mahalanobis_distance_reference,
)


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


@st.composite
def _launches_of_gaussian_field(draw: st.DrawFn) -> dict[str, Any]:
    B, N, dtype = (
        draw(st.one_of(sizes.count, st.sampled_from([100_000]))),
        draw(sizes.count),
        draw(sizes.wide_types),
    )
    return {
        "points": sizes.empty(B, 3, dtype=dtype),
        "means": sizes.empty(N, 3, dtype=dtype),
        "cholesky": sizes.empty(N, 3, 3, dtype=dtype),
        "weights": sizes.empty(N, dtype=dtype),
    }


@st.composite
def _launches_of_mahalanobis_distance(draw: st.DrawFn) -> dict[str, Any]:
    drawn = draw(_launches_of_gaussian_field())
    del drawn["weights"]
    return drawn


OPERATORS = (
    Operator(
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
        of_size=(
            lambda n: Problem(
                {"points": rand(4, 3), "means": rand(n, 3), "cholesky": rand(n, 3, 3) * torch.eye(3)},
                ("points", "means", "cholesky"),
            ),
        ),
        launches=_launches_of_mahalanobis_distance,
    ),
    Operator(
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
        of_size=(
            lambda n: Problem(
                {
                    "points": rand(n, 3),
                    "means": rand(4, 3),
                    "cholesky": rand(4, 3, 3) * torch.eye(3),
                    "weights": rand(4),
                    "tolerance": 0.0,
                },
                ("points", "means", "cholesky", "weights"),
            ),
            lambda n: Problem(
                {
                    "points": rand(n, 3),
                    "means": rand(4, 3),
                    "cholesky": rand(4, 3, 3) * torch.eye(3),
                    "weights": rand(4),
                    "tolerance": 0.01,
                },
                ("points", "means", "cholesky", "weights"),
            ),
            lambda n: Problem(
                {
                    "points": rand(4, 3),
                    "means": rand(n, 3),
                    "cholesky": rand(n, 3, 3) * torch.eye(3),
                    "weights": rand(n),
                    "tolerance": 0.0,
                },
                ("points", "means", "cholesky", "weights"),
            ),
            lambda n: Problem(
                {
                    "points": rand(4, 3),
                    "means": rand(n, 3),
                    "cholesky": rand(n, 3, 3) * torch.eye(3),
                    "weights": rand(n),
                    "tolerance": 0.01,
                },
                ("points", "means", "cholesky", "weights"),
            ),
        ),
        launches=_launches_of_gaussian_field,
    ),
)


@pytest.mark.parametrize("device", DEVICES)
def test_by_hand(device):
    # L = [[2, 0, 0], [1, 1, 0], [0, 2, 4]], x - mu = (2, 3, 8): v = (1, 2, 1), |v|^2 = 6.
    points = torch.tensor([[3.0, 4, 9]], device=device)
    means = torch.ones(1, 3, device=device)
    cholesky = torch.tensor([[[2.0, 9, 9], [1, 1, 9], [0, 2, 4]]], device=device)  # 9: not read
    assert mahalanobis_distance(points, means, cholesky).tolist() == [[6.0]]
    field = gaussian_field(points, means, cholesky, torch.tensor([5.0], device=device))
    assert field.item() == pytest.approx(5 * math.exp(-3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (17, 11), (5, 131), (300, 40), (1025, 257)], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_matches_reference(name, sizes, dtype, device):
    function, reference = OPS[name]
    case = arguments_of(name, make_case(*sizes, dtype=dtype, device=device))
    exact = [tensor.double().cpu() for tensor in case]
    grad_output = torch.randn(*grad_shape(name, *sizes), generator=torch.Generator().manual_seed(1)).to(dtype)
    output, grads = gradients(function, case, grad_output)
    expected, expected_grads = gradients(reference, exact, grad_output.double())
    assert output.dtype == dtype and output.device.type == device
    assert relative_error(output, expected) < TOLERANCE[dtype]
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert relative_error(grad, wanted) < 5 * TOLERANCE[dtype]
    assert (grads[2].triu(1) == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["random", "cov_tril", "ill_conditioned", "one", "points_at_means"])
def test_golden_vectors(case, device):
    arrays = under(golden("gaussian_field"), case)
    cholesky = arrays["input/cov_chol"] if "input/cov_chol" in arrays else arrays["output/cov_chol"]
    inputs = [arrays["input/points"], arrays["input/means"], cholesky, arrays["input/weights"]]
    inputs = [tensor.to(device) for tensor in inputs]
    names = ("points", "means", "cov_chol", "weights")
    for name, key in (("distance", "mahalanobis"), ("field", "field")):
        given = arguments_of(name, inputs)
        output, grads = gradients(OPS[name][0], given, arrays[f"input/grad_{key}"])
        # The ill-conditioned factors lose seven digits: the vectors themselves are 1.6e-8 from the exact distances.
        rtol = 1e-7 if case == "ill_conditioned" else 1e-9
        torch.testing.assert_close(output.cpu(), arrays[f"output/{key}"], rtol=rtol, atol=1e-12)
        for grad, argument in zip(grads, names, strict=False):
            if f"output/{key}/grad_{argument}" in arrays:
                wanted = arrays[f"output/{key}/grad_{argument}"]
                assert relative_error(grad, wanted) < rtol


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_gradcheck(name, device):
    leaves = [tensor.requires_grad_() for tensor in arguments_of(name, make_case(4, 3, device=device))]
    assert torch.autograd.gradcheck(OPS[name][0], leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_far_away_and_not_a_number(name, device):
    case = arguments_of(name, make_case(4, 3, dtype=torch.float32, device=device))
    case[0][1] = 1e18
    case[0][2] = math.nan
    output = OPS[name][0](*case)
    assert output[2].isnan().all() and output[[0, 3]].isfinite().all()
    assert (output[1] == 0).all() if name == "field" else (output[1] > 1e30).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tolerance_bounds_the_error(dtype, tolerance, device):
    case = make_case(3000, 500, dtype=dtype, device=device, spread=3.0, size=0.1)
    grad_output = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    expected, expected_grads = gradients(gaussian_field, case, grad_output)
    output, grads = gradients(
        lambda *tensors: gaussian_field(*tensors, tolerance=tolerance), case, grad_output
    )
    error = (output - expected).abs().max().item()
    assert error <= tolerance + TOLERANCE[dtype]
    if dtype == torch.float64 and device == "cpu":  # on CUDA float64 adds every pair
        assert error > 1e-6 * tolerance  # something was left out
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert relative_error(grad, wanted) < 5 * tolerance + 5 * TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_tolerance_never_leaves_out_nan_points(device):
    case = make_case(40, 30, dtype=torch.float32, device=device, size=0.05)
    case[0][7] = torch.tensor([math.nan, 100.0, 100.0])
    output = gaussian_field(*case, tolerance=1e-3)
    assert output[7].isnan() and output.isnan().sum() == 1
