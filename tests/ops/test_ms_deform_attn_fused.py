"""ms_deform_attn_fused: by hand, against the plain-torch definition, and every promise of its docstring."""

import math

import pytest
import torch
from torch.library import opcheck

from visdet.ops import ms_deform_attn, ms_deform_attn_fused, ms_deform_attn_fused_reference
from visdet.ops.ms_deform_attn import level_starts_of

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]

# Largest |difference| / largest |value| against the float64 reference on the same (rounded) numbers. What is 16 bits
# wide is rounded once, to a relative 2^-11 and 2^-8 of itself.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
# (type of value, type of offsets and logits)
TYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


def make_case(
    B, Q, G, C, num_points, shapes, references=2, dtype=torch.float64, inputs=None, device="cpu", seed=0
):
    """Return the arguments; a fifth of the samples are outside. No 32-bit position is near a texel centre."""
    generator = torch.Generator().manual_seed(seed)
    level_shapes = torch.tensor(shapes, dtype=torch.int64).reshape(-1, 2)
    S, L, K = int(level_shapes.prod(1).sum()), len(shapes), sum(num_points)
    coordinates = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = inputs or dtype
    value = torch.randn(B, S, G, C, generator=generator, dtype=torch.float64).to(dtype)
    reference_points = torch.rand(B, Q, L, references, generator=generator, dtype=torch.float64)
    reference_points[..., 2:] = reference_points[..., 2:] * 0.5 + 0.25
    offsets = torch.randn(B, Q, G, K, 2, generator=generator, dtype=torch.float64) * 2
    logits = torch.randn(B, Q, G, K, generator=generator, dtype=torch.float64)
    reference_points, offsets = reference_points.to(coordinates), offsets.to(inputs)
    offsets = _off_texel_centres(level_shapes, reference_points.double(), offsets, num_points)
    return (
        value.to(device),
        level_shapes,
        level_starts_of(level_shapes),
        reference_points.to(device),
        offsets.to(device),
        logits.to(inputs).to(device),
        list(num_points),
    )


def _off_texel_centres(level_shapes, references, offsets, num_points):
    """Return offsets of the same type; those that land near a texel centre, where the gradient jumps, are halved."""
    level = torch.arange(len(num_points)).repeat_interleave(torch.tensor(num_points, dtype=torch.int64))
    size = level_shapes.flip(1)[level].double()  # [K, 2]
    centre = references[:, :, level, :2].unsqueeze(2)
    scale = 1 / size
    if references.shape[-1] == 4:
        scale = (references[:, :, level, 2:] * 0.5 / torch.tensor(num_points)[level, None]).unsqueeze(2)
    for _ in range(20):
        pixel = (centre + offsets.double() * scale) * size - 0.5
        near = (pixel - pixel.round()).abs() < 0.02
        offsets = torch.where(near, offsets * 0.75 + 0.125, offsets)
    return offsets


CASES = {
    "B2-Q13-G3-C20-P4-4": (2, 13, 3, 20, [4, 4], [(7, 5), (3, 4)]),
    "B1-Q5-G1-C30-P3": (1, 5, 1, 30, [3], [(6, 9)]),
    "B3-Q17-G8-C32-P4-4-4-4": (3, 17, 8, 32, [4, 4, 4, 4], [(12, 15), (6, 8), (3, 4), (2, 2)]),
    "B2-Q40-G2-C32-P8-4-12": (2, 40, 2, 32, [8, 4, 12], [(6, 5), (1, 4), (3, 2)]),
    "B2-Q9-G2-C71-P3-6-3": (2, 9, 2, 71, [3, 6, 3], [(5, 4), (1, 7), (3, 1)]),
    "B1-Q55-G2-C64-P8-0-1": (1, 55, 2, 64, [8, 0, 1], [(6, 6), (3, 5), (2, 2)]),  # Q = S
    "B2-Q73-G3-C32-P3-6-3": (2, 73, 3, 32, [3, 6, 3], [(8, 7), (2, 7), (3, 1)]),  # Q = S
    # More samples than the CPU locates at a time, with and without room for whole registers of them.
    "B1-Q7-G2-C16-P11-11-11": (1, 7, 2, 16, [11, 11, 11], [(8, 7), (2, 7), (3, 1)]),
    "B1-Q7-G2-C16-P16-17-15": (1, 7, 2, 16, [16, 17, 15], [(8, 7), (2, 7), (3, 1)]),
    "B1-Q3-G1-C600-P1-2": (1, 3, 1, 600, [1, 2], [(4, 4), (2, 2)]),
    "B40-Q2-G1-C4-P1": (40, 2, 1, 4, [1], [(3, 3)]),
    "B1-Q4-G2-C8-P40-30-1": (1, 4, 2, 8, [40, 30, 1], [(9, 4), (4, 4), (2, 2)]),
}


def gradients(function, case, grad_output, of=(0, 3, 4, 5)):
    """Return the output and its gradients with respect to the arguments ``of``."""
    arguments = list(case)
    for index in of:
        arguments[index] = case[index].detach().clone().requires_grad_()
    output = function(*arguments)
    leaves = [arguments[index] for index in of]
    return output, torch.autograd.grad(output, leaves, grad_output.to(output.dtype))


def exactly(case):
    """Return the case in float64 on the CPU."""
    return [
        item.double().cpu() if isinstance(item, torch.Tensor) and item.is_floating_point() else item
        for item in case
    ]


def relative_error(actual, expected):
    scale = expected.abs().max().clamp(min=1e-30)
    return ((actual.double().cpu() - expected.double().cpu()).abs().max() / scale.cpu()).item()


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
    case = make_case(17, 262 + 3 * columns, 8, 32, num_points, shapes, references, dtype, inputs, device)
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
@pytest.mark.parametrize(
    "sizes", [(0, 5, 2, 4, 3), (2, 0, 2, 4, 3), (2, 5, 0, 4, 3), (2, 5, 2, 0, 3), (2, 5, 2, 4, 0)], ids=str
)
def test_empty_sizes(sizes, device, deterministic):
    B, Q, G, C, P = sizes
    case = make_case(B, Q, G, C, [P, P], [(3, 2), (2, 2)], dtype=torch.float32, device=device)
    output, grads = gradients(ms_deform_attn_fused, case, torch.ones(B, Q, G * C, device=device))
    assert output.shape == (B, Q, G * C) and (output == 0).all()
    assert [grad.shape for grad in grads] == [case[0].shape, *(tensor.shape for tensor in case[3:6])]
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_non_contiguous_inputs(dtype, device, deterministic):
    value, shapes, starts, refs, offsets, logits, points = make_case(
        *CASES["B3-Q17-G8-C32-P4-4-4-4"], 4, dtype, device=device
    )
    strided = (
        value.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        shapes.t().contiguous().t(),
        torch.stack([starts, starts], 1)[:, 0],
        torch.cat([refs, refs], -1)[..., 4:],
        offsets.transpose(0, 3).contiguous().transpose(0, 3),
        torch.cat([logits, logits], -1)[..., : logits.shape[-1]],
        points,
    )
    assert not any(tensor.is_contiguous() for tensor in strided[:-1])
    plain = (value, shapes, starts, refs, offsets, logits, points)
    assert torch.equal(ms_deform_attn_fused(*strided), ms_deform_attn_fused(*plain))
    grad_output = torch.ones(1, device=device, dtype=dtype).expand(3, 17, 8 * 32)
    for actual, expected in zip(
        gradients(ms_deform_attn_fused, strided, grad_output)[1],
        gradients(ms_deform_attn_fused, plain, grad_output.contiguous())[1],
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


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
@pytest.mark.parametrize(
    "types", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("references", [2, 4])
@pytest.mark.parametrize("name", [*CASES, "B2-Q63-G1-C32-P3-4"])
def test_gradients_side_by_side(name, references, types, device):
    """The attention module's node wants a query's offsets and logits in one row: the same numbers as apart."""
    sizes = CASES.get(name, (2, 63, 1, 32, [3, 4], [(8, 7), (1, 7)]))  # else an encoder with odd rows
    *case, num_points = make_case(*sizes, references, *types, device)
    value, offsets = case[0], case[4]
    grad_output = torch.randn(*offsets.shape[:2], value.shape[2] * value.shape[3]).to(value)
    for needs_reference in (False, True):
        options = grad_output, *case, num_points, needs_reference, True
        of_value, of_reference, of_offsets, of_logits = torch.ops.visdet.ms_deform_attn_fused_backward(
            *options
        )
        together = torch.cat((of_offsets.flatten(2), of_logits.flatten(2)), dim=2)
        joined = torch.ops.visdet.ms_deform_attn_fused_backward_joined(*options)
        for ours, theirs in zip(joined, (of_value, of_reference, together), strict=True):
            assert ours.is_contiguous() and torch.equal(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_levels_as_list_and_as_tensor_on_the_device(device):
    value, shapes, starts, *others = make_case(
        *CASES["B2-Q9-G2-C71-P3-6-3"], dtype=torch.float32, device=device
    )
    grad_output = torch.ones(2, 9, 142, device=device)
    expected, wanted = gradients(ms_deform_attn_fused, (value, shapes, starts, *others), grad_output)
    for level_shapes, level_starts in (
        (shapes.tolist(), starts.tolist()),
        (shapes.tolist(), None),
        (shapes.int(), starts.int()),
        (shapes.to(device), starts.to(device)),
        (shapes.to(device), None),
    ):
        output, grads = gradients(
            ms_deform_attn_fused, (value, level_shapes, level_starts, *others), grad_output
        )
        assert torch.equal(output, expected)
        for actual, grad in zip(grads, wanted, strict=True):
            torch.testing.assert_close(actual, grad)


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


def rejection_case():
    names = ("value", "level_shapes", "level_starts", "reference_points", "offsets", "logits", "num_points")
    return dict(zip(names, make_case(2, 5, 2, 4, [3, 3], [(3, 2), (2, 2)], dtype=torch.float32), strict=True))


REJECTIONS = {
    "value-3d": (dict(value=torch.zeros(2, 10, 8)), r"value must be \[B, S, G, C\], got \[2, 10, 8\]"),
    "shapes-sum": (
        dict(level_shapes=torch.tensor([[3, 2], [1, 3]])),
        "sum of height . width over level_shapes must be S = 10, got 9",
    ),
    "points-count": (
        dict(num_points=[3, 3, 3]),
        "num_points must be a number for each of the 2 levels, got 3",
    ),
    "points-negative": (dict(num_points=[7, -1]), "num_points must be 0 to 2.31 - 1, got -1"),
    "points-sum": (
        dict(num_points=[3, 4]),
        r"offsets must be \[B, Q, G, K, 2\] = \[2, Q, 2, 7, 2\], got \[2, 5, 2, 6, 2\]",
    ),
    "offsets-6d": (
        dict(offsets=torch.zeros(2, 5, 2, 2, 3, 2)),
        r"offsets must be \[B, Q, G, K, 2\] = \[2, Q, 2, 6, 2\], got \[2, 5, 2, 2, 3, 2\]",
    ),
    "offsets-device": (
        dict(offsets=torch.zeros(2, 5, 2, 6, 2, device="meta")),
        "offsets must be on value's device cpu, got meta",
    ),
    "logits-shape": (
        dict(logits=torch.zeros(2, 5, 2, 7)),
        r"logits must be \[B, Q, G, K\] = \[2, 5, 2, 6\], got \[2, 5, 2, 7\]",
    ),
    "logits-device": (
        dict(logits=torch.zeros(2, 5, 2, 6, device="meta")),
        "logits must be on value's device cpu, got meta",
    ),
    "references-3d": (
        dict(reference_points=torch.zeros(2, 5, 2)),
        r"reference_points must be \[B, Q, L, 2 or 4\] = \[2, 5, 2, 2 or 4\], got \[2, 5, 2\]",
    ),
    "references-size": (
        dict(reference_points=torch.zeros(2, 5, 2, 3)),
        r"reference_points must be .*got \[2, 5, 2, 3\]",
    ),
    "references-queries": (
        dict(reference_points=torch.zeros(2, 4, 2, 2)),
        r"reference_points must be .*got \[2, 4, 2, 2\]",
    ),
    "references-device": (
        dict(reference_points=torch.zeros(2, 5, 2, 2, device="meta")),
        "reference_points must be on value's device cpu, got meta",
    ),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejects(name):
    change, message = REJECTIONS[name]
    with pytest.raises(RuntimeError, match=message) as caught:
        ms_deform_attn_fused(**(rejection_case() | change))
    assert "ms_deform_attn" in str(caught.value)


def test_operator_itself_rejects_other_types():
    op, case = torch.ops.visdet.ms_deform_attn_fused, rejection_case()
    with pytest.raises(
        RuntimeError, match="reference_points must be Float for value of type Float, got Double"
    ):
        op(*(case | dict(reference_points=case["reference_points"].double())).values())
    with pytest.raises(RuntimeError, match="offsets must be Float for value of type Float, got Half"):
        op(*(case | dict(offsets=case["offsets"].half())).values())
    with pytest.raises(RuntimeError, match="logits must be Float, the type of offsets, got Double"):
        op(*(case | dict(logits=case["logits"].double())).values())


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_types_are_converted_and_get_their_gradients_back(device):
    value, shapes, starts, refs, offsets, logits, points = make_case(
        *CASES["B2-Q13-G3-C20-P4-4"], dtype=torch.float32, device=device
    )
    mixed = (value.half(), shapes, starts, refs.half(), offsets.bfloat16(), logits, points)
    output, grads = gradients(ms_deform_attn_fused, mixed, torch.ones(2, 13, 60, device=device))
    expected = ms_deform_attn_fused(
        value.half(), shapes, starts, refs.half().float(), offsets.bfloat16().float(), logits, points
    )
    assert torch.equal(output, expected)
    assert [grad.dtype for grad in grads] == [torch.float16, torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_keeps_every_type(device):
    value, shapes, starts, *others = make_case(
        *CASES["B2-Q13-G3-C20-P4-4"], dtype=torch.float32, device=device
    )
    expected = ms_deform_attn_fused(value, shapes, starts, *others)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(ms_deform_attn_fused(value, shapes, starts, *others), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("types", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("references", [2, 4])
def test_opcheck(references, types, device):
    value, shapes, starts, refs, offsets, logits, points = make_case(
        *CASES["B2-Q9-G2-C71-P3-6-3"], references, *types, device=device
    )
    leaves = [tensor.requires_grad_() for tensor in (value, refs, offsets, logits)]
    tolerance = dict(atol=1e-2, rtol=1e-2) if types[0] == torch.bfloat16 else {}
    for level_shapes, level_starts in ((shapes, starts), (shapes.to(device), starts.to(device))):
        arguments = (leaves[0], level_shapes, level_starts, *leaves[1:], points)
        opcheck(torch.ops.visdet.ms_deform_attn_fused.default, arguments, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_whole_with_a_dynamic_batch(device):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda v, *rest: ms_deform_attn_fused(v, [(7, 5), (3, 4)], None, *rest, 4).sin(),
        fullgraph=True,
        dynamic=None,
    )
    for batch in (2, 3, 5):
        value, shapes, starts, *others, points = make_case(
            batch, *CASES["B2-Q13-G3-C20-P4-4"][1:], 4, torch.float32, device=device
        )
        leaves = [tensor.clone().requires_grad_() for tensor in (value, *others)]
        out = compiled(*leaves)
        expected, wanted = gradients(
            lambda *case: ms_deform_attn_fused(*case).sin(),
            (value, shapes, starts, *others, points),
            torch.ones_like(out),
        )
        torch.testing.assert_close(out, expected)
        for actual, grad in zip(torch.autograd.grad(out.sum(), leaves), wanted, strict=True):
            torch.testing.assert_close(actual, grad, rtol=1e-4, atol=1e-4)


def test_exports():
    value, shapes, starts, *others, points = make_case(*CASES["B2-Q9-G2-C71-P3-6-3"], dtype=torch.float32)

    class Sampler(torch.nn.Module):
        def forward(self, value, references, offsets, logits):
            return ms_deform_attn_fused(
                value, shapes.tolist(), starts.tolist(), references, offsets, logits, points
            )

    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Sampler(), (value, *others), dynamic_shapes=({0: batch},) * 4, strict=False)
    assert "visdet.ms_deform_attn_fused" in str(program.graph)
    doubled = [torch.cat([tensor, tensor]) for tensor in (value, *others)]
    torch.testing.assert_close(
        program.module()(*doubled), ms_deform_attn_fused(doubled[0], shapes, starts, *doubled[1:], points)
    )


def test_meta_tensors_give_shapes():
    case = make_case(*CASES["B2-Q13-G3-C20-P4-4"], dtype=torch.bfloat16)
    out = ms_deform_attn_fused(
        *[item.to("meta") if isinstance(item, torch.Tensor) else item for item in case]
    )
    assert out.shape == (2, 13, 60) and out.dtype == torch.bfloat16 and out.device.type == "meta"


def test_result_does_not_depend_on_the_number_of_threads():
    case = make_case(2, 301, 4, 20, [4, 3], [(9, 11), (5, 6)], 4, dtype=torch.float32)
    grad_output = torch.randn(2, 301, 80, generator=torch.Generator().manual_seed(3))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            results.append(gradients(ms_deform_attn_fused, case, grad_output))
    finally:
        torch.set_num_threads(threads)
    for output, grads in results[1:]:
        assert torch.equal(output, results[0][0])
        assert all(torch.equal(grad, first) for grad, first in zip(grads, results[0][1], strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_mode_repeats_bit_for_bit(dtype, device):
    # Every query samples the same few texels, so the order of sums matters.
    case = make_case(2, 400, 4, 32, [4, 3], [(2, 3), (1, 2)], 4, dtype, device=device)
    grad_output = torch.randn(2, 400, 128, generator=torch.Generator().manual_seed(3)).to(device)
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(ms_deform_attn_fused, case, grad_output)
        for _ in range(3):
            again = gradients(ms_deform_attn_fused, case, grad_output)
            assert torch.equal(again[0], first[0])
            assert all(torch.equal(grad, same) for grad, same in zip(again[1], first[1], strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    wanted = gradients(ms_deform_attn_fused_reference, exactly(case), grad_output.to(dtype).double().cpu())[1]
    for grad, expected in zip(first[1], wanted, strict=True):
        assert relative_error(grad, expected) < max(TOLERANCE[dtype], 2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_saved_for_backward_is_the_inputs_and_nothing_else(device):
    value, shapes, starts, *others, points = make_case(
        *CASES["B3-Q17-G8-C32-P4-4-4-4"], dtype=torch.float32, device=device
    )
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        ms_deform_attn_fused(
            value.requires_grad_(), shapes, starts, *[tensor.requires_grad_() for tensor in others], points
        )
    inputs = {tensor.data_ptr() for tensor in (value, shapes, starts, *others)}
    assert {tensor.data_ptr() for tensor in saved} == inputs


@pytest.mark.parametrize("device", DEVICES)
def test_references_of_all_levels_are_copied_once_for_both_directions(device):
    value, shapes, starts, references, *others, points = make_case(
        *CASES["B3-Q17-G8-C32-P4-4-4-4"], dtype=torch.float32, device=device
    )
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        ms_deform_attn_fused(value.requires_grad_(), shapes, starts, references[:1, :, :1], *others, points)
    (copied,) = (tensor for tensor in saved if tensor.shape == references.shape)
    assert copied.is_contiguous()


@pytest.mark.cuda
def test_peak_memory_of_the_forward_is_the_output():
    case = make_case(1, 4000, 8, 32, [4, 4], [(20, 20), (10, 10)], dtype=torch.float32, device="cuda")
    ms_deform_attn_fused(*case)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = ms_deform_attn_fused(*case)
    assert torch.cuda.max_memory_allocated() - before == out.numel() * out.element_size()
    composed = ms_deform_attn(*case[:3], *_composed(case))
    torch.testing.assert_close(out, composed, rtol=1e-4, atol=1e-5)


def _composed(case):
    _, shapes, _, references, offsets, logits, num_points = case
    level, P = len(num_points), num_points[0]
    size = shapes.flip(1).to(offsets)
    locations = references[:, :, None, :, None] + offsets.unflatten(3, (level, P)) / size[:, None]
    return locations, logits.softmax(-1).unflatten(3, (level, P))


@pytest.mark.cuda
def test_current_stream_and_graph_capture():
    case = make_case(*CASES["B3-Q17-G8-C32-P4-4-4-4"], dtype=torch.float32, device="cuda")
    expected = ms_deform_attn_fused(*case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ms_deform_attn_fused(*case)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ms_deform_attn_fused(*case)
    case[0].mul_(2)
    graph.replay()
    torch.testing.assert_close(out, expected * 2)
