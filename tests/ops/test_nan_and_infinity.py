"""NaN and infinity reach what is computed from them and nothing else."""

import pytest
import torch

from visdet.ops import (
    gaussian_field,
    gaussian_field_reference,
    mahalanobis_distance,
    mahalanobis_distance_reference,
    sample_dot,
)

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]
TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def wide_of(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("C", [3, 20, 31])
def test_an_infinite_channel_of_queries_leaves_depths_alone(C, dtype, device):
    images = torch.randn(1, C, 4, 5, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    images[:, 0] = torch.inf
    samples = torch.full((1, 2, 3, 2), 0.3, dtype=wide_of(dtype), device=device)
    queries = torch.ones(1, 2, 2, C - 2, dtype=wide_of(dtype), device=device)
    depths = torch.full((1, 2, 3), 0.2, dtype=wide_of(dtype), device=device, requires_grad=True)
    dots = sample_dot(images, samples, queries, depths, 1)
    (gradient,) = torch.autograd.grad(dots, depths, torch.ones_like(dots))
    assert gradient.isfinite().all()
    assert gradient.all()


@pytest.mark.parametrize("device", DEVICES)
def test_depths_that_are_not_read_have_no_gradient(device):
    images = torch.randn(1, 3, 4, 5, device=device)
    samples = torch.zeros(1, 2, 3, 2, device=device)
    depths = torch.zeros(1, 2, 3, device=device, requires_grad=True)
    dots = sample_dot(images, samples, torch.ones(1, 2, 2, 3, device=device), depths)
    (gradient,) = torch.autograd.grad(dots, depths, torch.full_like(dots, torch.nan), allow_unused=True)
    assert gradient is None or not gradient.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
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
    torch.testing.assert_close(field, alone)
    expected = torch.autograd.grad(alone.sum(), (points, means, cholesky, weights))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


INF = torch.inf
ONES = (1.0, 1.0, 1.0)
# Means, and the diagonals and the numbers below them of factors, with what they add to the field at points near 0.
EXTREME = {
    "infinite mean": ((INF, 0.0, 0.0), ONES, (0.0, 0.0, 0.0), 0),
    "infinite corner": ((INF, -INF, INF), ONES, (0.5, 0.5, 0.5), 0),
    "far mean": ((3e38, -3e38, 3e38), ONES, (0.0, 0.5, 0.0), 0),
    "far mean, thin": ((3e38, -3e38, 3e38), (1e-18, 1e-18, 1e-18), (0.0, 0.0, 0.0), 0),
    "wide": ((0.0, 0.0, 0.0), (3e38, 3e38, 3e38), (3e38, -3e38, 3e38), 1),
    "wide at an infinite mean": ((0.0, INF, 0.0), (3e38, 3e38, 3e38), (0.0, 0.0, 0.0), 0),
    "skew": ((0.1, 0.2, 0.3), ONES, (3e38, 0.0, 0.0), 0),
    "skew everywhere": ((0.1, 0.2, 0.3), (1e-10, 1e-10, 1e-10), (1e38, 3e38, -3e38), 0),
    "thin and skew": ((0.1, 0.2, 0.3), (1.0, 1e-38, 1.0), (3e38, 0.0, 3e38), 0),
    "infinite factor": ((0.1, 0.2, 0.3), ONES, (INF, 0.0, -INF), 0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
@pytest.mark.parametrize("name", EXTREME)
def test_an_extreme_gaussian_spoils_nothing_but_its_own_term(name, tolerance, device):
    mean, diagonal, below, own = EXTREME[name]
    generator = torch.Generator().manual_seed(0)
    B, N = (
        (70000 if device == "cuda" and tolerance == 0 else 40),
        7,
    )  # so many points have a kernel of their own
    points, means = torch.randn(B, 3, generator=generator), torch.randn(N, 3, generator=generator)
    factors = torch.eye(3).repeat(N, 1, 1) + 0.2 * torch.randn(N, 3, 3, generator=generator).tril(-1)
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
        torch.testing.assert_close(field, wanted + own, rtol=1e-5, atol=1e-5)
        for grad, others in zip(grads, wanted_grads, strict=True):
            assert grad.isfinite().all()
            torch.testing.assert_close(grad[: len(others)], others, rtol=1e-4, atol=1e-4)
    functions = [mahalanobis_distance, mahalanobis_distance_reference] if tolerance == 0 else []
    for function in functions:
        distance, grads = _with_gradients(function, more[:3], device)
        assert distance[:, :N].isfinite().all() and not distance.isnan().any()
        assert (distance[:, N] == (0 if own else INF)).all() and all(grad.isfinite().all() for grad in grads)


def _with_gradients(function, tensors, device):
    leaves = [tensor.to(device).requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return output, torch.autograd.grad(output, leaves, torch.ones_like(output))


@pytest.mark.parametrize("device", DEVICES)
def test_points_and_gaussians_of_nan_are_nan_and_infinite_points_are_far(device):
    points = torch.tensor(
        [[0.0, 0.1, 0.2], [torch.nan, 0, 0], [0, INF, -INF], [3e38, 3e38, -3e38]], device=device
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
