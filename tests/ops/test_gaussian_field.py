"""gaussian_field and mahalanobis_distance: by hand, and against the plain-torch definition."""

import math

import pytest
import torch
from gaussian_field_cases import (
    DEVICES,
    OPS,
    TOLERANCE,
    arguments_of,
    grad_shape,
    gradients,
    make_case,
    relative_error,
)
from golden import golden, under

from visdet.ops import (
    gaussian_field,
    mahalanobis_distance,
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
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_16_bit_inputs_are_summed_in_float32(name, dtype, device):
    function, reference = OPS[name]
    case = arguments_of(name, make_case(20, 300, dtype=dtype, device=device))
    output = function(*case)
    expected = reference(*[tensor.double().cpu() for tensor in case])
    assert output.dtype == dtype
    assert relative_error(output, expected) < {torch.float16: 6e-4, torch.bfloat16: 5e-3}[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_empty_sizes(name, sizes, device):
    case = arguments_of(name, make_case(*sizes, device=device))
    output, grads = gradients(OPS[name][0], case, torch.ones(grad_shape(name, *sizes)))
    assert output.shape == grad_shape(name, *sizes) and not output.any()
    assert all(
        grad.shape == tensor.shape and not grad.any() for grad, tensor in zip(grads, case, strict=True)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_far_away_and_not_a_number(name, device):
    case = arguments_of(name, make_case(4, 3, dtype=torch.float32, device=device))
    case[0][1] = 1e18
    case[0][2] = math.nan
    output = OPS[name][0](*case)
    assert output[2].isnan().all() and output[[0, 3]].isfinite().all()
    assert (output[1] == 0).all() if name == "field" else (output[1] > 1e30).all()


@pytest.mark.parametrize("name", OPS)
def test_non_contiguous_inputs(name):
    case = arguments_of(name, make_case(9, 7))
    strided = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in case]
    assert not any(tensor.is_contiguous() for tensor in strided)
    expected, expected_grads = gradients(OPS[name][0], case, torch.ones(grad_shape(name, 9, 7)))
    output, grads = gradients(OPS[name][0], strided, torch.ones(1).expand(grad_shape(name, 9, 7)))
    assert torch.equal(output, expected)
    assert all(torch.equal(*pair) for pair in zip(grads, expected_grads, strict=True))


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
