"""deformable_aggregation: by hand, and against the plain-torch definition."""

import math

import pytest
import torch
from aggregation_cases import CASES, DEVICES, TOLERANCE, make_case
from calls import gradients, relative_error
from golden import golden, under

from visdet.ops import (
    deformable_aggregation,
    deformable_aggregation_function,
    deformable_aggregation_reference,
)


def test_one_pair_by_hand():
    # A 2 x 3 map; the sample at pixel (x=1.25, y=0.5) weighs its corners .375 .125 .375 .125. Two groups.
    features = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]).reshape(1, 6, 1).repeat(1, 1, 2)
    location = torch.tensor([(1.25 + 0.5) / 3, (0.5 + 0.5) / 2]).reshape(1, 1, 1, 1, 2)
    weights = torch.tensor([2.0, -1.0]).reshape(1, 1, 1, 1, 1, 2)
    out = deformable_aggregation(features, [[(2, 3)]], [[0]], location, weights)
    sample = 0.375 * 2 + 0.125 * 4 + 0.375 * 16 + 0.125 * 32
    assert out.flatten().tolist() == pytest.approx([2 * sample, -sample])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outside", [0.0, 1.0, -1e-7, 1 + 1e-6, math.nan, math.inf, -math.inf, 1e30, -1e30])
@pytest.mark.parametrize("axis", [0, 1])
def test_pair_not_strictly_inside_has_no_part(axis, outside, device):
    features = torch.ones(1, 4, 4, device=device)
    locations = torch.full((1, 1, 2, 1, 2), 0.5, device=device)
    locations[0, 0, 1, 0, axis] = outside
    weights = torch.ones(1, 1, 2, 1, 1, 2, device=device)
    weights[0, 0, 1] = math.nan
    case = (features, torch.tensor([[[2, 2]]]), torch.tensor([[0]]), locations, weights)
    for function in (deformable_aggregation, deformable_aggregation_reference):
        output, grads = gradients(function, case, torch.ones(1, 1, 4))
        assert output.flatten().tolist() == [1.0] * 4
        assert (grads[1][:, :, 1] == 0).all() and (grads[2][:, :, 1] == 0).all()
        assert grads[0].sum().item() == pytest.approx(4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights_follow_features", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name, dtype, weights_follow_features, device):
    case = list(make_case(*CASES[name], dtype=dtype, device=device))
    if weights_follow_features:
        case[4] = case[4].to(dtype)
    exact = [tensor.double().cpu() if tensor.is_floating_point() else tensor for tensor in case]
    B, Q, _, _, C = CASES[name]
    grad_output = torch.randn(B, Q, C, generator=torch.Generator().manual_seed(1)).to(dtype)
    output, grads = gradients(deformable_aggregation, case, grad_output)
    expected, expected_grads = gradients(deformable_aggregation_reference, exact, grad_output.double())
    assert output.dtype == dtype and output.device.type == device
    assert relative_error(output, expected) < TOLERANCE[dtype]
    tolerances = (
        TOLERANCE[dtype],
        1e-12 if dtype == torch.float64 else 2e-5,
        max(TOLERANCE[case[4].dtype], 2e-5) if dtype != torch.float64 else 1e-12,
    )
    for grad, wanted, tolerance in zip(grads, expected_grads, tolerances, strict=True):
        assert relative_error(grad, wanted) < tolerance
    assert [grad.dtype for grad in grads] == [case[0].dtype, case[3].dtype, case[4].dtype]


@pytest.mark.parametrize("suffix", ["", "_border", "_per_camera_shapes"])
def test_golden_vectors(suffix):
    arrays = under(golden("modules"), f"deformable_aggregation{suffix}")
    names = ("feature", "spatial_shapes", "start_index", "locations", "weights")
    case = [arrays[f"input/{name}"] for name in names]
    output, grads = gradients(deformable_aggregation_function, case, arrays["input/grad_output"])
    assert relative_error(output, arrays["output/output"]) < 1e-12
    for grad, name in zip(grads, ("feature", "locations", "weights"), strict=True):
        assert relative_error(grad, arrays[f"output/grad_{name}"]) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
def test_gradcheck(device):
    features, shapes, starts, locations, weights = make_case(2, 3, 2, 2, 6, device=device)
    leaves = [tensor.requires_grad_() for tensor in (features, locations, weights)]
    assert torch.autograd.gradcheck(
        lambda f, x, w: deformable_aggregation(f, shapes, starts, x, w), leaves, nondet_tol=1e-12
    )
