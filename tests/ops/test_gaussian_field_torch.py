"""What gaussian_field and mahalanobis_distance refuse, and what torch does with them; many points, orders and paths."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from calls import gradients, relative_error
from gaussian_field_cases import OPS, TOLERANCE, make_case

from visdet.ops import (
    gaussian_field,
    gaussian_field_reference,
    mahalanobis_distance,
    mahalanobis_distance_reference,
)
from visdet.ops.explain import choose_only


def bad_factor(value):
    factor = torch.eye(3).repeat(7, 1, 1)
    factor[4, 1, 1] = value
    return factor


REJECTIONS = {
    "points-2": (dict(points=torch.zeros(5, 2)), r"points must be \[B, 3\], got \[5, 2\]"),
    "points-int": (
        dict(points=torch.zeros(5, 3, dtype=torch.int64)),
        "points must be a floating-point tensor",
    ),
    "means": (dict(means=torch.zeros(7, 4)), r"means must be \[N, 3\], got \[7, 4\]"),
    "cholesky": (
        dict(cholesky=torch.zeros(6, 3, 3)),
        r"cholesky must be \[N, 3, 3\] = \[7, 3, 3\], got \[6, 3, 3\]",
    ),
    "diagonal-zero": (dict(cholesky=bad_factor(0.0)), r"positive diagonals, got \(1, 0, 1\) for Gaussian 4"),
    "diagonal-negative": (
        dict(cholesky=bad_factor(-2.0)),
        r"positive diagonals, got \(1, -2, 1\) for Gaussian 4",
    ),
    "diagonal-nan": (dict(cholesky=bad_factor(math.nan)), "positive diagonals"),
    "weights": (dict(weights=torch.zeros(6)), r"weights must be \[7\], got \[6\]"),
}


@pytest.mark.parametrize(
    "name, change",
    [(name, change) for name in OPS for change in REJECTIONS if (name, change) != ("distance", "weights")],
)
def test_rejects(name, change):
    changes, message = REJECTIONS[change]
    case = make_case(5, 7, dtype=torch.float32)
    case[2] = torch.eye(3).repeat(7, 1, 1)
    arguments = dict(zip(("points", "means", "cholesky", "weights"), case, strict=True)) | changes
    if name == "distance":
        arguments.pop("weights")
    with pytest.raises(RuntimeError, match=message) as caught:
        OPS[name][0](**arguments)
    assert str(caught.value).startswith(("mahalanobis_distance: ", "gaussian_field: "))


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, math.inf])
def test_rejects_tolerance(tolerance):
    with pytest.raises(ValueError, match="tolerance must be a finite number of at least 0, got"):
        gaussian_field(*make_case(5, 7), tolerance=tolerance)


@pytest.mark.parametrize("change", ["points", "means"])
def test_rejects_other_dimensions_with_a_tolerance_too(change):
    """The order in space, which the tolerance asks for, is of three coordinates."""
    case = dict(zip(("points", "means", "cholesky", "weights"), make_case(5, 7), strict=True))
    case[change] = case[change][:, :2]
    with pytest.raises(RuntimeError, match=f"gaussian_field: {change} must be "):
        gaussian_field(**case, tolerance=1e-3)


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
    torch.testing.assert_close(
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
    exact = [tensor.to(dtype).double() for tensor in case]
    case = [tensor.to(dtype).cuda() for tensor in case]
    grad_output = torch.zeros(B)
    rows = torch.cat([torch.arange(0, B, 997), torch.tensor([B - 2, B - 1])])
    grad_output[rows] = 1
    output, grads = gradients(gaussian_field, case, grad_output.cuda())
    expected, expected_grads = gradients(
        gaussian_field_reference, [exact[0][rows], *exact[1:]], torch.ones(len(rows))
    )
    assert relative_error(output[rows.cuda()], expected) < bound
    assert relative_error(grads[0][rows.cuda()], expected_grads[0]) < 4 * bound
    for grad, wanted in zip(grads[1:], expected_grads[1:], strict=True):
        assert relative_error(grad, wanted) < 4 * bound
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
    expected = gaussian_field(*(tensor.double() for tensor in case))
    assert relative_error(output, expected) < 3e-6
    assert torch.equal(gaussian_field(*case), output)


def operator_arguments(case, point_order, gaussian_order):
    orders = [
        torch.tensor(order, dtype=torch.int64, device=case[0].device)
        for order in (point_order, gaussian_order)
    ]
    return (*case, *orders, 1e-3)


@pytest.mark.parametrize("bad, got", [([0, 1, 7], "7 at 2"), ([0, -1, 2], "-1 at 1"), ([0, 1, 1], "1 at 2")])
@pytest.mark.parametrize("which", ["point_order", "gaussian_order"])
def test_order_that_is_no_permutation_is_refused(which, bad, got):
    orders = {"point_order": [2, 0, 1], "gaussian_order": [1, 2, 0]} | {which: bad}
    arguments = operator_arguments(make_case(3, 3), **orders)
    with pytest.raises(RuntimeError, match=f"{which} must be a permutation of 0 to 2, got {got}"):
        torch.ops.visdet.gaussian_field.default(*arguments)
    with pytest.raises(RuntimeError, match=f"{which} must be a permutation of 0 to 2"):
        torch.ops.visdet.gaussian_field_backward.default(torch.ones(3, dtype=torch.float64), *arguments)


STRAY_ORDERS = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from gaussian_field_cases import make_case
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
    tests = Path(__file__).resolve().parent
    command = [sys.executable, "-c", STRAY_ORDERS, str(tests), str(tests.parent)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


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
        torch.testing.assert_close(distance[:, first : first + 1000], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "dtype, tolerance, path",
    [
        (torch.float32, 1e-9, "culled"),
        (torch.float32, 0.0, "one_point"),
        (torch.float64, 1e-9, "one_point"),
    ],
    ids=str,
)
def test_every_path_of_the_backward_gives_the_same(dtype, tolerance, path):
    B, N = 100_000, 40
    case = make_case(B, N, dtype=dtype, device="cuda")
    orders = [torch.arange(count, device="cuda").flip(0) for count in (B, N)]
    grad_output = torch.randn(B, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    expected = gradients(
        gaussian_field_reference, [tensor.double() for tensor in case], grad_output.double()
    )[1]
    with choose_only("gaussian_field_backward", path):
        grads = torch.ops.visdet.gaussian_field_backward.default(grad_output, *case, *orders, tolerance)
    bound = 5 * TOLERANCE[dtype] + (1e-6 if tolerance else 0)
    for grad, wanted in zip(grads, expected, strict=True):
        assert relative_error(grad, wanted) < bound


@pytest.mark.cuda
@pytest.mark.parametrize(
    "dtype, path",
    [
        (torch.float32, "culled"),
        (torch.float32, "many_points"),
        (torch.float32, "one_point"),
        (torch.float64, "one_point"),
    ],
    ids=str,
)
def test_every_path_of_the_forward_gives_the_same(dtype, path):
    B, N = 100_000, 40
    case = make_case(B, N, dtype=dtype, device="cuda")
    orders = [torch.arange(count, device="cuda").flip(0) for count in (B, N)]
    expected = gaussian_field_reference(*[tensor.double() for tensor in case])
    with choose_only("gaussian_field", path):
        field = torch.ops.visdet.gaussian_field.default(*case, *orders, 1e-6)
    assert relative_error(field, expected) < TOLERANCE[dtype] + 2e-6
