"""ms_deform_attn: by hand, and against the plain-torch definition."""

import itertools
import math

import pytest
import torch
from attention_cases import CASES, DEVICES, TOLERANCE, make_case, output_of
from calls import gradients, relative_error
from golden import golden, under

from visdet.ops import ms_deform_attn, ms_deform_attn_reference


def test_one_sample_by_hand():
    # A 2 x 3 map of one channel; the sample at pixel (x=1.25, y=0.5) weighs its corners .375 .125 .375 .125.
    value = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]).reshape(1, 6, 1, 1)
    location = torch.tensor([(1.25 + 0.5) / 3, (0.5 + 0.5) / 2]).reshape(1, 1, 1, 1, 1, 2)
    weight = torch.full((1, 1, 1, 1, 1), 2.0)
    out = ms_deform_attn(value, [(2, 3)], [0], location, weight)
    assert out.shape == (1, 1, 1)
    assert out.item() == pytest.approx(2 * (0.375 * 2 + 0.125 * 4 + 0.375 * 16 + 0.125 * 32))


def test_corner_outside_counts_as_zero_by_hand():
    # Pixel (-0.5, -0.5): only texel (0, 0) is inside, with weight 1/4. Pixel (-1, 0) does not count.
    value = torch.tensor([8.0, 1.0, 1.0, 1.0]).reshape(1, 4, 1, 1)
    location = torch.tensor([[0.0, 0.0], [-0.25, 0.25]]).reshape(1, 2, 1, 1, 1, 2)
    out = ms_deform_attn(value, [(2, 2)], [0], location, torch.ones(1, 2, 1, 1, 1))
    assert out.flatten().tolist() == [2.0, 0.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name, dtype, device, deterministic):
    case = make_case(*CASES[name], dtype=dtype, device=device)
    exact = [tensor.double().cpu() if tensor.is_floating_point() else tensor for tensor in case]
    generator = torch.Generator().manual_seed(1)
    grad_output = torch.randn(
        case[0].shape[0], case[3].shape[1], case[0].shape[2] * case[0].shape[3], generator=generator
    )
    grad_output = grad_output.to(dtype)
    output, grads = gradients(ms_deform_attn, case, grad_output.to(device))
    expected, expected_grads = gradients(ms_deform_attn_reference, exact, grad_output.double())
    assert output.dtype == dtype and output.device.type == device
    assert relative_error(output, expected) < TOLERANCE[dtype]
    coordinate_tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for grad, wanted, tolerance in zip(
        grads, expected_grads, (TOLERANCE[dtype], coordinate_tolerance, coordinate_tolerance), strict=True
    ):
        assert relative_error(grad, wanted) < tolerance
    assert [grad.dtype for grad in grads] == [case[0].dtype, case[3].dtype, case[4].dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("P", [1, 2, 3, 5, 7, 8, 12, 15, 17, 20, 31, 33, 65])
def test_any_number_of_samples_leaves_the_neighbours_alone(P, dtype):
    # CPU loops run to whole registers: past a row's samples they read the next row's, which here are no numbers.
    value, shapes, starts, locations, weights = make_case(1, 5, 3, 4, P, [(7, 5)], dtype=dtype)
    alone = [locations[:, ::2], weights[:, ::2]]
    locations[:, 1::2], weights[:, 1::2] = math.nan, math.inf
    grad_output = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(1), dtype=dtype)
    output, grads = gradients(ms_deform_attn, (value, shapes, starts, locations, weights), grad_output)
    expected, expected_grads = gradients(
        ms_deform_attn_reference, (value, shapes, starts, *alone), grad_output[:, ::2]
    )
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    assert relative_error(output[:, ::2], expected) < tolerance
    assert relative_error(grads[0], expected_grads[0]) < tolerance
    for grad, wanted in zip(grads[1:], expected_grads[1:], strict=True):
        assert relative_error(grad[:, ::2], wanted) < tolerance
        assert not grad[:, 1::2].any()


def test_golden_vectors():
    arrays = under(golden("modules"), "ms_deform_attn")
    case = [
        arrays[f"input/{name}"]
        for name in ("value", "spatial_shapes", "level_start_index", "locations", "weights")
    ]
    output, grads = gradients(ms_deform_attn, case, arrays["input/grad_output"])
    assert relative_error(output, arrays["output/output"]) < 1e-12
    for grad, name in zip(grads, ("value", "locations", "weights"), strict=True):
        assert relative_error(grad, arrays[f"output/grad_{name}"]) < 1e-12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["B2-Q13-G3-C20-P4-L2", "B2-Q9-G2-C71-P5-L3"])
def test_gradcheck(name, device, deterministic):
    B, _, G, C, P, shapes = CASES[name]
    value, level_shapes, starts, locations, weights = make_case(B, 3, G, min(C, 5), P, shapes, device=device)
    leaves = [tensor.requires_grad_() for tensor in (value, locations, weights)]
    assert torch.autograd.gradcheck(
        lambda v, x, w: ms_deform_attn(v, level_shapes, starts, x, w),
        leaves,
        nondet_tol=1e-12 if device == "cuda" else 0.0,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, -1e30, 2.0**40])
def test_position_that_is_no_number_contributes_nothing(bad, device, deterministic):
    case = make_case(*CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.float32, device=device)
    value, shapes, starts, locations, weights = case
    weights_without = weights.clone()
    weights_without[:, ::2, :, 0, 1] = 0
    bad_locations = locations.clone()
    bad_locations[:, ::2, :, 0, 1, 0] = bad
    bad_weights = weights.clone()
    bad_weights[:, ::2, :, 0, 1] = math.nan
    for weight in (weights, bad_weights):
        output, grads = gradients(
            ms_deform_attn, (value, shapes, starts, bad_locations, weight), torch.ones_like(output_of(case))
        )
        torch.testing.assert_close(output, ms_deform_attn(value, shapes, starts, locations, weights_without))
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[1][:, ::2, :, 0, 1] == 0).all() and (grads[2][:, ::2, :, 0, 1] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_border_positions(device):
    # Locations on, just inside and just outside the last position that counts, on both sides of both axes.
    H, W = 3, 4
    edges_x = [(-1 + 0.5) / W, (W + 0.5) / W, 0.0, 1.0]
    edges_y = [(-1 + 0.5) / H, (H + 0.5) / H, 0.0, 1.0]
    nudges = [-1e-4, 0.0, 1e-4]
    points = [
        (x + dx, y + dy)
        for (x, y), dx, dy in itertools.product(itertools.product(edges_x, edges_y), nudges, nudges)
    ]
    locations = torch.tensor(points, dtype=torch.float64, device=device).reshape(1, -1, 1, 1, 1, 2)
    value = torch.rand(1, H * W, 1, 6, dtype=torch.float64, device=device)
    weights = torch.ones(1, len(points), 1, 1, 1, dtype=torch.float64, device=device)
    shapes, starts = torch.tensor([[H, W]]), torch.tensor([0])
    out = ms_deform_attn(value, shapes, starts, locations, weights)
    torch.testing.assert_close(out, ms_deform_attn_reference(value, shapes, starts, locations, weights))


@pytest.mark.parametrize("device", DEVICES)
def test_no_levels(device):
    value = torch.ones(1, 0, 2, 4, device=device)
    locations, weights = torch.ones(1, 3, 2, 0, 4, 2, device=device), torch.ones(1, 3, 2, 0, 4, device=device)
    out = ms_deform_attn(
        value, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), locations, weights
    )
    assert out.shape == (1, 3, 8) and (out == 0).all()


@pytest.mark.cuda
def test_no_levels_on_the_device_but_rows():
    # The host cannot know that the levels cover no row; with Q = S this would be an encoder.
    value = torch.ones(4, 3000, 2, 4, device="cuda")
    shapes, starts = torch.zeros(0, 2, dtype=torch.int64).cuda(), torch.zeros(0, dtype=torch.int64).cuda()
    locations, weights = (
        torch.ones(4, 3000, 2, 0, 4, 2, device="cuda"),
        torch.ones(4, 3000, 2, 0, 4, device="cuda"),
    )
    assert (ms_deform_attn(value, shapes, starts, locations, weights) == 0).all()
