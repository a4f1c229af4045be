"""gaussian_field and mahalanobis_distance: by hand, and against the plain-torch definition."""

import math
from functools import partial

import pytest
import torch
from calls import assert_near, exact, gradients, in_a_process, relative_error
from golden import golden, under
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz import sizes
from tests.fuzz.problem import (
    HALVES,
    WIDE_TYPES,
    Draw,
    Operator,
    Problem,
    generator_of,
    largest,
    rand,
    wide_of,
)
from visdet.ops import (
    gaussian_field,
    gaussian_field_reference,
    mahalanobis_distance,
    mahalanobis_distance_reference,
)
from visdet.ops.explain import choose_only

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


OPS = {
    "distance": (mahalanobis_distance, mahalanobis_distance_reference),
    "field": (gaussian_field, gaussian_field_reference),
}


def make_case(B, N, dtype=torch.float64, device="cpu", seed=0, spread=1.0, size=0.6):
    """Return points, means, cholesky, weights."""
    generator = generator_of(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    factors = (size * 0.3 * draw(N, 3, 3)).tril(-1) + torch.diag_embed(size * (0.6 + draw(N, 3).sigmoid()))
    tensors = (draw(B, 3) * spread, draw(N, 3) * spread, factors, draw(N))
    return [tensor.to(dtype).to(device) for tensor in tensors]


def arguments_of(name, case):
    return case if name == "field" else case[:3]


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
        "points": draw.place(points, dtype, bad=0.5),
        "means": draw.place(means, draw.dtype(wide, wide, *HALVES), bad=0.5),
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
    tensors["weights"] = draw.values(N, dtype=draw.dtype(wide, wide, *HALVES))
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
    weights, reach = problem.arguments["weights"], 1 + v
    peak = largest(weights)
    total = peak * max(1, len(weights))
    gradient = bounds.get("grad_total", 0.0)
    slope = gradient * inverse * reach
    bounds["output"] = total * reach
    for name, bound in (
        ("points", total * slope),
        ("means", peak * slope),
        ("cholesky", peak * slope * reach),
        ("weights", gradient * reach),
    ):
        if name in bounds:
            bounds[name] = bound


TENSORS = ("points", "means", "cholesky", "weights")


def _of_sizes(B: int, N: int, names: tuple[str, ...] = TENSORS, **settings: float) -> Problem:
    """Return a problem of B points and N round Gaussians."""
    round_factors = rand(N, 3, 3) * torch.eye(3)
    tensors = dict(zip(TENSORS, (rand(B, 3), rand(N, 3), round_factors, rand(N)), strict=True))
    return Problem({name: tensors[name] for name in names} | settings, names)


GAUSSIANS = dict(types=sizes.wide_types, points="N 3", means="M 3", cholesky="M 3 3")
OPERATORS = (
    Operator(
        "mahalanobis_distance",
        mahalanobis_distance,
        _draw_distance,
        _distance,
        _distance_bounds,
        spoiled={"points": ("rank", 1), "means": ("rank", 0, 1), "cholesky": (0, 1, 2)},
        of_size=(lambda n: _of_sizes(4, n, ("points", "means", "cholesky")),),
        launches=sizes.arguments(**GAUSSIANS),
    ),
    Operator(
        "gaussian_field",
        gaussian_field,
        _draw_field,
        _field,
        _field_bounds,
        spoiled={
            "points": ("rank", 1),
            "means": ("rank", 0, 1),
            "cholesky": (0, 1, 2),
            "weights": ("rank", 0),
        },
        of_size=(
            lambda n: _of_sizes(n, 4),
            lambda n: _of_sizes(n, 4, tolerance=0.01),
            lambda n: _of_sizes(4, n),
            lambda n: _of_sizes(4, n, tolerance=0.01),
        ),
        launches=sizes.arguments(**GAUSSIANS, weights="M"),
    ),
)


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
        assert_close(output.cpu(), arrays[f"output/{key}"], rtol=rtol, atol=1e-12)
        wanted = [arrays.get(f"output/{key}/grad_{argument}") for argument in names[: len(grads)]]
        known = [number for number, one in enumerate(wanted) if one is not None]
        assert_near([grads[i] for i in known], [wanted[i] for i in known], rtol)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tolerance_bounds_the_error(dtype, tolerance, device):
    case = make_case(3000, 500, dtype=dtype, device=device, spread=3.0, size=0.1)
    expected, expected_grads = gradients(gaussian_field, case)
    output, grads = gradients(partial(gaussian_field, tolerance=tolerance), case)
    error = (output - expected).abs().max().item()
    assert error <= tolerance + TOLERANCE[dtype]
    if dtype == torch.float64 and device == "cpu":  # on CUDA float64 adds every pair
        assert error > 1e-6 * tolerance  # something was left out
    assert_near(grads, expected_grads, 5 * tolerance + 5 * TOLERANCE[dtype])


def test_tolerance_never_leaves_out_nan_points(device):
    case = make_case(40, 30, dtype=torch.float32, device=device, size=0.05)
    case[0][7] = torch.tensor([math.nan, 100.0, 100.0])
    output = gaussian_field(*case, tolerance=1e-3)
    assert output[7].isnan() and output.isnan().sum() == 1


ROUND = torch.eye(3).repeat(7, 1, 1)


def bad_factor(value):
    factor = ROUND.clone()
    factor[4, 1, 1] = value
    return factor


CASE = dict(zip(TENSORS, make_case(5, 7, dtype=torch.float32), strict=True))
CASE["cholesky"] = ROUND
DISTANCE_CASE = {name: CASE[name] for name in ("points", "means", "cholesky")}
REFUSED = [
    *(
        (partial(function, **case | changes), f"^(mahalanobis_distance|gaussian_field): .*{message}")
        for function, case in ((mahalanobis_distance, DISTANCE_CASE), (gaussian_field, CASE))
        for changes, message in (
            (dict(cholesky=bad_factor(0.0)), r"positive diagonals, got \(1, 0, 1\) for Gaussian 4"),
            (
                dict(cholesky=bad_factor(-2.0)),
                r"positive diagonals, got \(1, -2, 1\) for Gaussian 4",
            ),
            (dict(cholesky=bad_factor(math.nan)), "positive diagonals"),
        )
    ),
]


@pytest.mark.cuda
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_bad_diagonal_on_cuda_yields_nan(value):
    case = [tensor.cuda() for tensor in make_case(5, 7, dtype=torch.float32)]
    case[2] = bad_factor(value).cuda()
    distance = mahalanobis_distance(*case[:3])
    assert distance[:, 4].isnan().all() and distance[:, :4].isfinite().all()
    assert gaussian_field(*case).isnan().all()
    assert gaussian_field(*case, tolerance=1e-3).isnan().all()


@pytest.mark.cuda
def test_more_than_two_to_the_31_elements():
    B, N = 70_000, 31_000
    case = make_case(B, N, dtype=torch.float32, device="cuda")
    output = mahalanobis_distance(*case[:3])
    assert output.numel() > 2**31
    rows = torch.tensor([0, B - 1], device="cuda")
    assert_close(
        output[rows], mahalanobis_distance_reference(case[0][rows], *case[1:3]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 3e-6)], ids=str)
def test_many_points_of_narrow_gaussians_far_from_the_origin(dtype, bound):
    """A float32 thread has many of so many points; narrow Gaussians need the difference to a point first."""
    B, N, size = 150_001, 333, 1e-3
    case = make_case(B, N, size=size)
    case[1] = case[1].sigmoid() + 1
    case[0] = case[1][torch.arange(B) % N] + size * case[0]
    case = [tensor.to(dtype).cuda() for tensor in case]
    points, *gaussians = exact(case)
    grad_output = torch.zeros(B)
    rows = torch.cat([torch.arange(0, B, 997), torch.tensor([B - 2, B - 1])])
    grad_output[rows] = 1
    output, grads = gradients(gaussian_field, case, grad_output.cuda())
    expected, expected_grads = gradients(
        gaussian_field_reference, [points[rows], *gaussians], torch.ones(len(rows))
    )
    of_points, *others = grads
    found = output[rows.cuda()], of_points[rows.cuda()], *others
    assert_near(found, (expected, *expected_grads), *(bound, *[4 * bound] * 4))
    assert torch.equal(gaussian_field(*case), output)
    case[0][rows.cuda()] = math.nan
    is_nan = gaussian_field(*case).isnan()
    assert is_nan[rows.cuda()].all() and is_nan.sum() == len(rows)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "B, N", [(67_584, 1), (70_001, 33), (100_000, 1000), (400_003, 2500), (1_200_000, 700)]
)
def test_parts_of_many_points(B, N):
    """The Gaussians come in parts of different sizes, their number by B and N; each is added once."""
    case = make_case(B, N, dtype=torch.float32, device="cuda")
    output = gaussian_field(*case)
    assert relative_error(output, gaussian_field(*(tensor.double() for tensor in case))) < 3e-6
    assert torch.equal(gaussian_field(*case), output)


STRAY_ORDERS = """
import torch
from test_gaussian_field import make_case
import visdet.ops
case = make_case(300, 200, dtype=torch.float32, device="cuda")
for bad in (10**15, -(10**15), 2**63 - 1):
    orders = [torch.full((count,), bad, device="cuda") for count in (300, 200)]
    torch.ops.visdet.gaussian_field.default(*case, *orders, 1e-3)
    torch.ops.visdet.gaussian_field_backward.default(torch.ones(300, device="cuda"), *case, *orders, 1e-3)
    torch.cuda.synchronize()
"""


@pytest.mark.cuda
def test_order_of_any_numbers_on_cuda_leads_to_no_stray_access():
    in_a_process(STRAY_ORDERS)


@pytest.mark.cuda
@pytest.mark.parametrize("B", [1, 70])
def test_distances_of_more_gaussians_than_a_grid_has_columns(B):
    N = (1 << 23) + 1000
    points, means, cholesky, _ = make_case(B, 1000, dtype=torch.float32, device="cuda")
    means, cholesky = means.repeat(N // 1000 + 1, 1)[:N], cholesky.repeat(N // 1000 + 1, 1, 1)[:N]
    distance = mahalanobis_distance(points, means, cholesky)
    expected = mahalanobis_distance_reference(points, means[:1000], cholesky[:1000])
    for first in (0, 5_000_000, N - 1608):
        wanted = expected.roll(-(first % 1000), 1)
        assert_close(distance[:, first : first + 1000], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "op, dtype, path, tolerance",
    [
        ("gaussian_field", torch.float32, "culled", 1e-6),
        ("gaussian_field", torch.float32, "many_points", 1e-6),
        ("gaussian_field", torch.float32, "one_point", 1e-6),
        ("gaussian_field", torch.float64, "one_point", 1e-6),
        ("gaussian_field_backward", torch.float32, "culled", 1e-9),
        ("gaussian_field_backward", torch.float32, "one_point", 0.0),
        ("gaussian_field_backward", torch.float64, "one_point", 1e-9),
    ],
    ids=str,
)
def test_every_path_gives_the_same(op, dtype, path, tolerance):
    B, N = 100_000, 40
    case = make_case(B, N, dtype=dtype, device="cuda")
    orders = [torch.arange(count, device="cuda").flip(0) for count in (B, N)]
    grad_output = torch.randn(B, generator=generator_of(1)).to(dtype).cuda()
    field, grads = gradients(gaussian_field_reference, exact(case), grad_output.double())
    is_backward = op == "gaussian_field_backward"
    given = [grad_output, *case] if is_backward else case
    with choose_only(op, path):
        found = getattr(torch.ops.visdet, op).default(*given, *orders, tolerance)
    bound = 5 * TOLERANCE[dtype] + (1e-6 if tolerance else 0) if is_backward else TOLERANCE[dtype] + 2e-6
    pairs = zip(found, grads, strict=True) if is_backward else [(found, field)]
    assert all(relative_error(one, wanted) < bound for one, wanted in pairs)


@pytest.mark.parametrize("dtype", WIDE_TYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_gaussian_without_thickness_leaves_the_others_alone(axis, dtype, device):
    points = torch.tensor(
        [[0.3, -0.2, 0.1], [1.0, 0.5, -0.4]], dtype=dtype, device=device, requires_grad=True
    )
    means = torch.zeros(2, 3, dtype=dtype, device=device, requires_grad=True)
    cholesky = torch.eye(3, dtype=dtype, device=device).repeat(2, 1, 1)
    cholesky[1, axis, axis] = torch.finfo(dtype).smallest_normal / 128
    weights = torch.ones(2, dtype=dtype, device=device, requires_grad=True)
    field = gaussian_field(points, means, cholesky.requires_grad_(), weights)
    gradients = torch.autograd.grad(field.sum(), (points, means, cholesky, weights))
    alone = gaussian_field(points, means[:1], cholesky[:1], weights[:1])
    assert_close(field, alone)
    expected = torch.autograd.grad(alone.sum(), (points, means, cholesky, weights))
    assert_close(gradients, expected)


# Means, and the diagonals and the numbers below them of factors, with what they add to the field at points near 0.
UNIT, ZEROS, NEAR, HUGE = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (0.1, 0.2, 0.3), (3e38, -3e38, 3e38)
EXTREME = {
    "infinite mean": ((torch.inf, 0.0, 0.0), UNIT, ZEROS, 0),
    "infinite corner": ((torch.inf, -torch.inf, torch.inf), UNIT, (0.5, 0.5, 0.5), 0),
    "far mean": (HUGE, UNIT, (0.0, 0.5, 0.0), 0),
    "far mean, thin": (HUGE, (1e-18, 1e-18, 1e-18), ZEROS, 0),
    "wide": (ZEROS, (3e38, 3e38, 3e38), HUGE, 1),
    "wide at an infinite mean": ((0.0, torch.inf, 0.0), (3e38, 3e38, 3e38), ZEROS, 0),
    "skew": (NEAR, UNIT, (3e38, 0.0, 0.0), 0),
    "skew everywhere": (NEAR, (1e-10, 1e-10, 1e-10), (1e38, 3e38, -3e38), 0),
    "thin and skew": (NEAR, (1.0, 1e-38, 1.0), (3e38, 0.0, 3e38), 0),
    "infinite factor": (NEAR, UNIT, (torch.inf, 0.0, -torch.inf), 0),
}


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
@pytest.mark.parametrize("name", EXTREME)
def test_an_extreme_gaussian_spoils_nothing_but_its_own_term(name, tolerance, device):
    mean, diagonal, below, own = EXTREME[name]
    B, N = (
        (70000 if device == "cuda" and tolerance == 0 else 40),
        7,
    )  # so many points have a kernel of their own
    points, means = torch.randn(B, 3), torch.randn(N, 3)
    factors = torch.eye(3).repeat(N, 1, 1) + 0.2 * torch.randn(N, 3, 3).tril(-1)
    factor = torch.diag(torch.tensor(diagonal))
    factor[1, 0], factor[2, 0], factor[2, 1] = below
    case = [points, means, factors, torch.ones(N)]
    more = [
        points,
        torch.cat([means, torch.tensor([mean])]),
        torch.cat([factors, factor[None]]),
        torch.ones(N + 1),
    ]
    functions = [lambda *tensors: gaussian_field(*tensors, tolerance)]
    functions += [gaussian_field_reference] if tolerance == 0 and device == "cpu" else []
    for function in functions:
        (field, grads), (wanted, wanted_grads) = (
            _with_gradients(function, tensors, device) for tensors in (more, case)
        )
        assert_close(field, wanted + own, rtol=1e-5, atol=1e-5)
        for grad, others in zip(grads, wanted_grads, strict=True):
            assert grad.isfinite().all()
            assert_close(grad[: len(others)], others, rtol=1e-4, atol=1e-4)
    functions = [mahalanobis_distance, mahalanobis_distance_reference] if tolerance == 0 else []
    for function in functions:
        distance, grads = _with_gradients(function, more[:3], device)
        assert distance[:, :N].isfinite().all() and not distance.isnan().any()
        assert (distance[:, N] == (0 if own else torch.inf)).all() and all(
            grad.isfinite().all() for grad in grads
        )


def _with_gradients(function, tensors, device):
    leaves = [tensor.to(device).requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return output, torch.autograd.grad(output, leaves, torch.ones_like(output))


def test_points_and_gaussians_of_nan_are_nan_and_infinite_points_are_far(device):
    points = torch.tensor(
        [[0.0, 0.1, 0.2], [torch.nan, 0, 0], [0, torch.inf, -torch.inf], [3e38, 3e38, -3e38]], device=device
    )
    means, factors = torch.zeros(2, 3, device=device), torch.eye(3, device=device).repeat(2, 1, 1)
    weights = torch.ones(2, device=device)
    field, grads = _with_gradients(gaussian_field, [points[[0, 2, 3]], means, factors, weights], device)
    assert field[0] > 1 and not field[1:].any() and all(grad.isfinite().all() for grad in grads)
    assert gaussian_field(points, means, factors, weights).isnan().tolist() == [False, True, False, False]
    for spoilt in (means.clone(), factors.clone()):
        spoilt.view(2, -1)[1, 1 if spoilt.dim() == 2 else 3] = torch.nan
        tensors = (spoilt, factors) if spoilt.dim() == 2 else (means, spoilt)
        assert gaussian_field(points, *tensors, weights).isnan().all()
        distance = mahalanobis_distance(points, *tensors)
        assert distance[:, 1].isnan().all() and distance[[0, 2, 3], 0].isnan().sum() == 0
