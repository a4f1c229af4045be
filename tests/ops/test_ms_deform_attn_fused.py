"""ms_deform_attn_fused: by hand, and against the plain-torch definition."""

import math

import pytest
import torch
from calls import gradients, relative_error
from fused_attention_cases import CASES, DEVICES, TOLERANCE, TYPES, exactly, make_case

from visdet.ops import ms_deform_attn_fused, ms_deform_attn_fused_reference


@pytest.mark.parametrize("device", DEVICES)
def test_two_samples_by_hand(device):
    # One row of texels 1 2 4 8, reference at the centre of texel 1: pixel (1, 0). Offsets of 0.5 and 1 pixel: pixels
    # 1.5 and 2, values 3 and 4. Logits 0 and ln 3: weights 1/4 and 3/4.
    value = torch.tensor([1.0, 2.0, 4.0, 8.0], device=device).reshape(1, 4, 1, 1)
    reference = torch.tensor([1.5 / 4, 0.5], device=device).reshape(1, 1, 1, 2)
    offsets = torch.tensor([[0.5, 0.0], [1.0, 0.0]], device=device).reshape(1, 1, 1, 2, 2)
    logits = torch.tensor([0.0, math.log(3)], device=device).reshape(1, 1, 1, 2)
    out = ms_deform_attn_fused(value, [(1, 4)], None, reference, offsets, logits, 2)
    assert out.shape == (1, 1, 1) and out.item() == pytest.approx(3 / 4 + 3)
    # A box of width w: an offset of 1 is worth w / 2 divided by the level's 2 samples. w = 1 is 4 pixels: 1 pixel.
    box = torch.tensor([1.5 / 4, 0.5, 1.0, 1.0], device=device).reshape(1, 1, 1, 4)
    assert ms_deform_attn_fused(value, [(1, 4)], None, box, offsets, logits, [2]).item() == pytest.approx(
        3 / 4 + 3
    )


def assert_gradients_match(grads, wanted, case, of=(0, 3, 4, 5)):
    """Compare gradients with respect to the arguments ``of`` of the case with those in float64."""
    coordinates = 1e-12 if case[0].dtype == torch.float64 else 2e-5
    for index, grad, expected in zip(of, grads, wanted, strict=True):
        assert grad.dtype == case[index].dtype
        rounding = TOLERANCE[case[index].dtype]
        tolerance = {0: rounding, 3: coordinates}.get(index, max(rounding, coordinates))
        assert relative_error(grad, expected) < tolerance, index


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("references", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name, references, types, device, deterministic):
    dtype, inputs = types
    case = make_case(*CASES[name], references, dtype, inputs, device)
    B, Q, G, C = CASES[name][:4]
    grad_output = torch.randn(B, Q, G * C, generator=torch.Generator().manual_seed(1)).to(dtype)
    output, grads = gradients(ms_deform_attn_fused, case, grad_output.to(device))
    expected, expected_grads = gradients(ms_deform_attn_fused_reference, exactly(case), grad_output.double())
    assert output.dtype == dtype and output.device.type == device
    assert relative_error(output, expected) < TOLERANCE[dtype]
    assert_gradients_match(grads, expected_grads, case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("references", [2, 4])
@pytest.mark.parametrize(
    "num_points, columns",
    [
        ([4, 4, 4], 1),
        ([4, 4, 4], 2),
        ([4, 8, 0], 2),
        ([4, 4, 8], 1),
        ([4, 4, 8], 2),
        ([8, 16, 8], 2),
        ([3, 6, 0], 1),
    ],
    ids=str,
)
def test_an_encoders_many_rows_match_reference(num_points, columns, references, types, device):
    dtype, inputs = types
    shapes = [(17, 15), (1, 7), (3, columns)]
    B = 17 if device == "cuda" else 2  # On the CPU every image is treated alike.
    case = make_case(B, 262 + 3 * columns, 8, 32, num_points, shapes, references, dtype, inputs, device)
    expected = ms_deform_attn_fused_reference(*exactly(case))
    assert relative_error(ms_deform_attn_fused(*case), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("references", [2, 4])
def test_gradcheck(references, device, deterministic):
    value, shapes, starts, *others, num_points = make_case(
        2, 3, 2, 5, [2, 3], [(5, 4), (2, 3)], references, device=device
    )
    leaves = [tensor.requires_grad_() for tensor in (value, *others)]
    assert torch.autograd.gradcheck(
        lambda v, *rest: ms_deform_attn_fused(v, shapes, starts, *rest, num_points),
        leaves,
        nondet_tol=1e-12 if device == "cuda" else 0.0,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("references", [2, 4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_position_that_is_no_number_contributes_nothing(bad, references, device, deterministic):
    value, shapes, starts, refs, offsets, logits, points = make_case(
        2, 7, 3, 20, [4, 3], [(7, 5), (3, 4)], references, torch.float32, device=device
    )
    grad_output = torch.ones(2, 7, 60, device=device)
    # Its weight takes part in the softmax all the same: compare with a sample far outside.
    outside, broken = offsets.clone(), offsets.clone()
    outside[:, ::2, :, 1] = 1e6
    broken[:, ::2, :, 1, 0] = bad
    expected, wanted = gradients(
        ms_deform_attn_fused, (value, shapes, starts, refs, outside, logits, points), grad_output
    )
    output, grads = gradients(
        ms_deform_attn_fused, (value, shapes, starts, refs, broken, logits, points), grad_output
    )
    torch.testing.assert_close(output, expected)
    for grad, finite in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, finite)
    assert (grads[2][:, ::2, :, 1] == 0).all()

    refs = refs.clone()
    refs[:, 3] = bad
    output, grads = gradients(
        ms_deform_attn_fused, (value, shapes, starts, refs, offsets, logits, points), grad_output
    )
    assert (output[:, 3] == 0).all() and output.isfinite().all() and all(g.isfinite().all() for g in grads)
    assert (grads[1][:, 3] == 0).all() and (grads[2][:, 3] == 0).all() and (grads[3][:, 3] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_extreme_logits(dtype, device):
    value, shapes, starts, refs, _, _, points = make_case(
        1, 6, 1, 4, [3, 2], [(4, 4), (2, 2)], dtype=dtype, device=device
    )
    offsets = torch.zeros(1, 6, 1, 5, 2, dtype=dtype, device=device)  # every sample counts
    logits = torch.tensor(
        [
            [1e4, 1e4, -1e4, 0, 1e4],
            [-1e30, -1e30, -1e30, -1e30, -1e30],
            [-math.inf, 2, 1, -math.inf, 0],
            [-math.inf] * 5,
            [math.nan, 0, 0, 0, 0],
            [-80, -60, -100, 0, -20],
        ],
        dtype=dtype,
        device=device,
    ).reshape(1, 6, 1, 5)
    out = ms_deform_attn_fused(value, shapes, starts, refs, offsets, logits, points)
    expected = ms_deform_attn_fused_reference(value, shapes, starts, refs, offsets, logits, points)
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert out[0, 3:5].isnan().all() and out[0, :3].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_encoders_inputs_at_odd_addresses(dtype, device):
    # Slices that begin one element into their storage: a pair of them cannot be read at once.
    shapes = [(17, 15), (1, 7), (3, 1)]
    *rest, offsets, logits, points = make_case(17, 265, 8, 32, [4, 4, 4], shapes, 2, dtype, device=device)
    shifted = [
        tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor) for tensor in (offsets, logits)
    ]
    expected = ms_deform_attn_fused(*rest, offsets, logits, points)
    assert torch.equal(ms_deform_attn_fused(*rest, *shifted, points), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_one_reference_serves_the_batch_and_the_levels(device):
    value, shapes, starts, refs, offsets, logits, points = make_case(
        *CASES["B2-Q13-G3-C20-P4-4"], dtype=torch.float64, device=device
    )
    shared = refs[:1, :, :1].clone().requires_grad_()
    full = refs[:1, :, :1].expand(2, 13, 2, 2).clone().requires_grad_()
    out = ms_deform_attn_fused(value, shapes, starts, shared, offsets, logits, 4)
    expected = ms_deform_attn_fused(value, shapes, starts, full, offsets, logits, points)
    assert torch.equal(out, expected)
    (grad,) = torch.autograd.grad(out.sin().sum(), shared)
    (wanted,) = torch.autograd.grad(expected.sin().sum(), full)
    torch.testing.assert_close(grad, wanted.sum((0, 2), keepdim=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("references", [2, 4])
@pytest.mark.parametrize("num_points", [[4, 0, 0], [8, 0, 1], [3, 6, 3], [8, 16, 8]], ids=str)
def test_references_that_need_no_gradient(num_points, references, types, device, deterministic):
    dtype, inputs = types
    case = make_case(2, 73, 3, 32, num_points, [(8, 7), (2, 7), (3, 1)], references, dtype, inputs, device)
    grad_output = torch.randn(2, 73, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    of = (0, 4, 5)
    grads = gradients(ms_deform_attn_fused, case, grad_output.to(device), of)[1]
    wanted = gradients(ms_deform_attn_fused_reference, exactly(case), grad_output.double(), of)[1]
    assert_gradients_match(grads, wanted, case, of)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of", [(0, 4, 5), (0, 3, 4, 5)], ids=["offsets", "references-and-offsets"])
def test_gradients_of_an_encoders_many_rows(of, dtype, device):
    """A block of the CUDA kernel owns rows of two heads, and more than it works out the softmax of at a time."""
    case = make_case(17, 268, 8, 32, [4, 4, 4], [(17, 15), (1, 7), (3, 2)], 2, dtype, device=device)
    grad_output = torch.randn(17, 268, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = gradients(ms_deform_attn_fused, case, grad_output.to(device), of)[1]
    wanted = gradients(ms_deform_attn_fused_reference, exactly(case), grad_output.double(), of)[1]
    assert_gradients_match(grads, wanted, case, of)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("references", [2, 4])
def test_twenty_levels(references, device):
    # On CUDA more than travel with a launch: the path of separate operators.
    case = make_case(1, 5, 2, 8, [1, 2] * 10, [(3, 4)] * 20, references, torch.float32, device=device)
    grad_output = torch.ones(1, 5, 16, device=device)
    output, grads = gradients(ms_deform_attn_fused, case, grad_output)
    expected, wanted = gradients(ms_deform_attn_fused_reference, exactly(case), grad_output.double().cpu())
    assert relative_error(output, expected) < 5e-6
    for actual, grad in zip(grads, wanted, strict=True):
        assert relative_error(actual, grad) < 2e-5
