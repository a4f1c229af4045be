"""ms_deform_attn: by hand, against the plain-torch definition, and every promise of its docstring."""

import itertools
import math

import pytest
import torch
from golden import golden, under
from torch.library import opcheck

from visdet.ops import ms_deform_attn, ms_deform_attn_fused, ms_deform_attn_reference
from visdet.ops.ms_deform_attn import level_starts_of

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]


@pytest.fixture(params=[False, True], ids=["any-order", "deterministic"])
def deterministic(request, device):
    """Run both ways: on CUDA the backward has a kernel that sorts (always, in this mode) and one that does not."""
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


# Largest |difference| / largest |value| of the output against the float64 reference on the same (rounded)
# values. The 16-bit outputs are rounded once, to a relative 2^-11 and 2^-8 of themselves; gradients of
# value likewise.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def make_case(B, Q, G, C, P, shapes, dtype=torch.float64, device="cpu", seed=0, spread=0.15):
    """Return value, shapes, starts, locations (some outside), weights; positions keep off texel centres."""
    generator = torch.Generator().manual_seed(seed)
    level_shapes = torch.tensor(shapes, dtype=torch.int64).reshape(-1, 2)
    S, L = int(level_shapes.prod(1).sum()), len(shapes)
    coordinate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    value = torch.randn(B, S, G, C, generator=generator, dtype=torch.float64).to(dtype)
    locations = (
        torch.rand(B, Q, G, L, P, 2, generator=generator, dtype=torch.float64) * (1 + 2 * spread) - spread
    )
    size = level_shapes.flip(1)[None, None, None, :, None].double()
    pixels = locations * size - 0.5
    fraction = pixels - pixels.floor()
    locations = (pixels.floor() + fraction.clamp(0.05, 0.95) + 0.5) / size
    weights = torch.randn(B, Q, G, L, P, generator=generator, dtype=torch.float64)
    return (
        value.to(device),
        level_shapes,
        level_starts_of(level_shapes),
        locations.to(coordinate_dtype).to(device),
        weights.to(coordinate_dtype).to(device),
    )


CASES = {
    "B2-Q13-G3-C20-P4-L2": (2, 13, 3, 20, 4, [(7, 5), (3, 4)]),
    "B1-Q5-G1-C30-P3-L1": (1, 5, 1, 30, 3, [(6, 9)]),
    "B3-Q17-G8-C32-P4-L4": (3, 17, 8, 32, 4, [(12, 15), (6, 8), (3, 4), (2, 2)]),
    "B2-Q9-G2-C71-P5-L3": (2, 9, 2, 71, 5, [(5, 4), (1, 7), (3, 1)]),
    "B1-Q33-G2-C64-P8-L3": (1, 33, 2, 64, 8, [(8, 8), (4, 5), (2, 3)]),
    "B1-Q3-G1-C1025-P1-L2": (1, 3, 1, 1025, 1, [(4, 4), (2, 2)]),
    "B2-Q3-G3-C20-P2-L2": (2, 3, 3, 20, 2, [(7, 5), (3, 4)]),  # fewer samples than texels
    "B65-Q2-G1-C4-P1-L1": (65, 2, 1, 4, 1, [(3, 3)]),
    "B1-Q4-G2-C8-P30-L3": (1, 4, 2, 8, 30, [(9, 4), (4, 4), (2, 2)]),
}


def gradients(function, case, grad_output):
    value, shapes, starts, locations, weights = case
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (value, locations, weights)]
    output = function(leaves[0], shapes, starts, leaves[1], leaves[2])
    return output, torch.autograd.grad(output, leaves, grad_output.to(output.dtype))


def relative_error(actual, expected):
    scale = expected.abs().max().clamp(min=1e-30)
    return ((actual.double().cpu() - expected.double().cpu()).abs().max() / scale.cpu()).item()


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


# Enough rows that a CUDA launch gives none of them more than one group of threads: an encoder's own queries (more
# regions and heads than a block owns; a map narrower than a region), numbers of points and channels that are no
# multiples of what a group takes, and rows wider than it takes at once.
MANY_ROWS = {
    "pyramid": (17, 265, 8, 32, 4, [(17, 15), (1, 7), (3, 1)]),
    "pyramid-whole-passes": (17, 269, 8, 32, 4, [(17, 15), (1, 7), (3, 1), (2, 2)]),
    "pyramid-whole-passes-wide": (9, 269, 8, 64, 4, [(17, 15), (1, 7), (3, 1), (2, 2)]),
    "pyramid-two-passes": (17, 272, 8, 32, 8, [(17, 15), (1, 7), (3, 2), (2, 2)]),
    "pyramid-known-columns": (17, 272, 8, 32, 4, [(17, 15), (1, 7), (3, 2), (2, 2)]),
    "pyramid-known-columns-twelve": (17, 268, 8, 32, 4, [(17, 15), (1, 7), (3, 2)]),
    "pyramid-known-columns-twelve-on-one": (17, 255, 8, 32, 12, [(17, 15)]),
    "pyramid-half-as-wide": (9, 272, 16, 16, 4, [(17, 15), (1, 7), (3, 2), (2, 2)]),  # also 256 channels
    "pyramid-three-points": (17, 265, 8, 20, 3, [(17, 15), (1, 7), (3, 1)]),
    "pyramid-thirty-samples": (17, 265, 8, 30, 10, [(17, 15), (1, 7), (3, 1)]),
    "pyramid-three-channels": (17, 265, 8, 3, 4, [(17, 15), (1, 7), (3, 1)]),
    "pyramid-wide": (17, 54, 8, 300, 4, [(6, 8), (2, 3)]),
    "pyramid-regions": (9, 1712, 16, 8, 4, [(40, 34), (20, 17), (4, 3)]),
    # In which a warp on CUDA has more turns than it works out the queries of at once, in 16 bit, too.
    "pyramid-known-columns-many-turns": (16, 1716, 8, 32, 4, [(40, 34), (20, 17), (4, 3), (2, 2)]),
    "three-points": (17, 260, 8, 20, 3, [(6, 5), (1, 1), (2, 3)]),
    "eight-points": (17, 260, 8, 32, 8, [(6, 5), (1, 1), (2, 3)]),
    "wide": (17, 40, 8, 300, 4, [(3, 4), (1, 2)]),
    "one-head": (70, 260, 1, 32, 8, [(6, 5), (1, 2), (2, 3)]),
    # Rows that several groups share, in bfloat16 four, two and one.
    "forty-queries": (17, 40, 8, 32, 4, [(6, 5), (1, 1), (2, 3)]),
    "eighty-queries": (17, 80, 8, 32, 4, [(6, 5), (1, 1), (2, 3)]),
    "two-hundred-queries": (17, 200, 8, 32, 4, [(6, 5), (1, 1), (2, 3)]),
    # Few rows again, with more samples than are prepared at a time, of wider and of narrower heads.
    "five-levels": (3, 150, 4, 32, 4, [(6, 5), (1, 1), (2, 3), (1, 4), (3, 1)]),
    "five-levels-wide": (3, 30, 4, 128, 8, [(6, 5), (1, 1), (2, 3), (1, 4), (3, 1)]),
    "narrow": (3, 300, 4, 12, 4, [(6, 5), (2, 3)]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MANY_ROWS)
def test_many_rows_match_reference(name, dtype, device):
    case = make_case(*MANY_ROWS[name], dtype=dtype, device=device)
    exact = [tensor.double().cpu() if tensor.is_floating_point() else tensor for tensor in case]
    assert relative_error(output_of(case), ms_deform_attn_reference(*exact)) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_an_encoders_queries_without_samples(device):
    case = make_case(17, 265, 8, 32, 0, [(17, 15), (1, 7), (3, 1)], dtype=torch.float32, device=device)
    assert (output_of(case) == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_an_encoders_queries_with_other_levels(device):
    """The levels on the device, and levels that share rows, so that the queries are no texels of theirs."""
    value, shapes, starts, locations, weights = make_case(
        *MANY_ROWS["pyramid"], dtype=torch.float32, device=device
    )
    expected = ms_deform_attn(value, shapes, starts, locations, weights)
    assert torch.equal(
        ms_deform_attn(value, shapes.to(device), starts.to(device), locations, weights), expected
    )
    shared = torch.tensor([0, 3, 200])
    exact = [tensor.double().cpu() for tensor in (value, locations, weights)]
    reference = ms_deform_attn_reference(exact[0], shapes, shared, *exact[1:])
    for level_shapes, level_starts in ((shapes, shared), (shapes.to(device), shared.to(device))):
        output = ms_deform_attn(value, level_shapes, level_starts, locations, weights)
        assert relative_error(output, reference) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("Q", [3, 60])
def test_one_channel_with_the_strides_of_a_channels_last_tensor(Q, dtype, device):
    value, shapes, starts, *others = make_case(2, Q, 1, 1, 2, [(5, 4), (3, 3)], dtype=dtype, device=device)
    odd = value.as_strided(value.shape, (29, 1, 29, 29))
    assert torch.equal(odd, value)
    grad_output = torch.randn(2, Q, 1, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    odd_grad = grad_output.as_strided(grad_output.shape, (Q, 1, Q))

    def run(value, grad_output):
        leaves = [tensor.detach().requires_grad_() for tensor in (value, *others)]
        output = ms_deform_attn(leaves[0], shapes, starts, *leaves[1:])
        return output, *torch.autograd.grad(output, leaves, grad_output)

    for one, other in zip(run(odd, odd_grad), run(value, grad_output), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_encoders_levels_known_to_the_host_or_not(dtype):
    """Levels of two columns or more: the host then chooses a kernel that it cannot choose for levels on the device."""
    value, shapes, starts, *others = make_case(
        *MANY_ROWS["pyramid-known-columns"], dtype=dtype, device="cuda"
    )
    on_device = ms_deform_attn(value, shapes.cuda(), starts.cuda(), *others)
    # The two kernels add a row's samples in another order.
    torch.testing.assert_close(ms_deform_attn(value, shapes, starts, *others), on_device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["pyramid", "pyramid-known-columns", "pyramid-known-columns-twelve", "one-head"]
)
def test_many_rows_position_that_is_no_number_contributes_nothing(name, dtype, bad, device):
    value, shapes, starts, locations, weights = make_case(*MANY_ROWS[name], dtype=dtype, device=device)
    without = weights.clone()
    without[:, ::3, :, 0, 1] = 0
    locations[:, ::3, :, 0, 1, 1] = bad
    weights[:, ::3, :, 0, 1] = math.nan
    assert torch.equal(
        ms_deform_attn(value, shapes, starts, locations, weights),
        ms_deform_attn(value, shapes, starts, locations.nan_to_num(0.5, 0.5), without),
    )


# An encoder's backward works on chunks of queries: rows of one to 32 packs of channels, points that are no multiple of
# what it takes at once, samples so far apart that they share a bucket, more heads than a chunk has queries.
ENCODERS = {
    "pyramid": (3, 265, 8, 32, 4, [(17, 15), (1, 7), (3, 1)]),
    "thirty-samples": (2, 265, 2, 30, 10, [(17, 15), (1, 7), (3, 1)]),
    "one-pack-of-channels": (2, 265, 3, 4, 3, [(17, 15), (1, 7), (3, 1)]),
    "sixteen-packs": (2, 265, 2, 64, 2, [(17, 15), (1, 7), (3, 1)]),
    "most-channels": (2, 265, 2, 128, 3, [(17, 15), (1, 7), (3, 1)]),
    "too-many-channels": (2, 54, 2, 300, 4, [(6, 8), (2, 3)]),
    "wide-map": (1, 6000, 2, 8, 5, [(40, 150)]),
    "small-maps": (70, 6, 4, 16, 4, [(2, 2), (1, 1), (1, 1)]),
}


def check_gradients(case, coordinate_tolerance=2e-5):
    value, shapes, starts, locations, weights = case
    grad_output = torch.randn(
        value.shape[0],
        locations.shape[1],
        value.shape[2] * value.shape[3],
        generator=torch.Generator().manual_seed(1),
    ).to(value.dtype)
    _, grads = gradients(ms_deform_attn, case, grad_output.to(value.device))
    exact = [tensor.double().cpu() for tensor in (value, locations, weights)]
    _, expected = gradients(
        ms_deform_attn_reference,
        (exact[0], shapes.cpu(), starts.cpu(), *exact[1:]),
        grad_output.double(),
    )
    # float32 rounds a position on 150 columns by 1e-5 texels.
    tolerances = max(TOLERANCE[value.dtype], 1e-5), coordinate_tolerance, coordinate_tolerance
    for grad, wanted, tolerance in zip(grads, expected, tolerances, strict=True):
        assert relative_error(grad, wanted) < tolerance


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_gradients_of_an_encoder(name, dtype, device, deterministic):
    check_gradients(make_case(*ENCODERS[name], dtype=dtype, device=device), 5e-5)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_gradients_of_an_encoders_queries_with_other_levels(device):
    """The levels on the device, and levels that share rows and leave some out."""
    value, shapes, starts, locations, weights = make_case(
        *ENCODERS["pyramid"], dtype=torch.float32, device=device
    )
    check_gradients((value, shapes.to(device), starts.to(device), locations, weights))
    shared = torch.tensor([0, 3, 200])
    check_gradients((value, shapes, shared, locations, weights))
    check_gradients((value, shapes.to(device), shared.to(device), locations, weights))
    # A level that does not lie within S: its own samples' gradients say so, those of the other levels are right.
    outside = torch.tensor([0, 264, 262])
    grad_output = torch.ones(3, 265, 256, device=device)
    _, grads = gradients(
        ms_deform_attn, (value, shapes.to(device), outside.to(device), locations, weights), grad_output
    )
    for grad in grads[1:]:
        assert grad[:, :, :, 1].isnan().all() and grad[:, :, :, ::2].isfinite().all()
    assert grads[0].isfinite().all()


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e30])
def test_gradients_of_an_encoders_position_that_is_no_number(bad, device):
    value, shapes, starts, locations, weights = make_case(
        *ENCODERS["pyramid"], dtype=torch.float32, device=device
    )
    without = weights.clone()
    without[:, ::3, :, 0, 1] = 0
    expected = gradients(ms_deform_attn, (value, shapes, starts, locations, without), value.flatten(2))[1]
    locations[:, ::3, :, 0, 1, 1] = bad
    weights[:, ::3, :, 0, 1] = math.nan
    grads = gradients(ms_deform_attn, (value, shapes, starts, locations, weights), value.flatten(2))[1]
    assert (grads[1][:, ::3, :, 0, 1] == 0).all() and (grads[2][:, ::3, :, 0, 1] == 0).all()
    torch.testing.assert_close(grads[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads[1][:, 1::3], expected[1][:, 1::3])


@pytest.mark.cuda
def test_graph_capture_of_an_encoders_backward():
    case = make_case(*ENCODERS["pyramid"], dtype=torch.bfloat16, device="cuda")
    grad_output = torch.ones(3, 265, 256, dtype=torch.bfloat16, device="cuda")
    arguments = (grad_output, *case, False)
    expected = torch.ops.visdet.ms_deform_attn_backward(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = torch.ops.visdet.ms_deform_attn_backward(*arguments)
    for _ in range(2):
        graph.replay()
        for grad, same in zip(grads, expected, strict=True):
            assert relative_error(grad, same) < 1e-2


@pytest.mark.parametrize("device", DEVICES[1:])
def test_gradients_of_a_large_map_with_few_samples_a_cell(device, deterministic):
    case = make_case(1, 16000, 1, 4, 16, [(250, 240)], dtype=torch.float32, device=device)
    grad_output = torch.randn(1, 16000, 4, generator=torch.Generator().manual_seed(1))
    _, grads = gradients(ms_deform_attn, case, grad_output.to(device))
    exact = [tensor.double().cpu() if tensor.is_floating_point() else tensor for tensor in case]
    _, expected = gradients(ms_deform_attn_reference, exact, grad_output.double())
    for grad, wanted in zip(grads, expected, strict=True):
        assert relative_error(grad, wanted) < 1e-4  # of a position on 250 texels; float32 rounds it


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("extent", [0.0, 0.01, 0.3])
def test_gradients_of_a_crowd_of_samples(extent, dtype, device, deterministic):
    # 12000 samples a level in one cell, in a few and in a hundred: more than a block sorts at once.
    case = list(make_case(1, 3000, 1, 4, 4, [(20, 30), (5, 6)], dtype=dtype, spread=0.0))
    size = case[1].flip(1)[None, None, None, :, None]
    pixels = (case[3] * extent + 0.37).double() * size - 0.5
    case[3] = ((pixels.floor() + (pixels - pixels.floor()).clamp(0.05, 0.95) + 0.5) / size).to(dtype)
    grad_output = torch.randn(1, 3000, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, expected = gradients(
        ms_deform_attn_reference, [t.double() if t.is_floating_point() else t for t in case], grad_output
    )
    there = [case[0].to(device), case[1], case[2], case[3].to(device), case[4].to(device)]
    _, grads = gradients(ms_deform_attn, there, grad_output.to(device))
    _, again = gradients(ms_deform_attn, there, grad_output.to(device))
    for grad, same, wanted in zip(grads, again, expected, strict=True):
        assert relative_error(grad, wanted) < (1e-11 if dtype == torch.float64 else 1e-4)
        if torch.are_deterministic_algorithms_enabled():
            assert torch.equal(grad, same)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_infinite_gradient_reaches_its_own_samples_only(dtype, device, deterministic):
    # Query 0 lies on the left half of the map, all others, of which there are enough for sorting, on the right one.
    case = list(make_case(1, 60, 2, 32, 4, [(6, 8)], dtype=dtype, device=device, spread=0.0))
    case[3] = case[3] * torch.tensor([0.3, 1.0], device=device) + torch.tensor([0.65, 0.0], device=device)
    case[3][:, 0, ..., 0] -= 0.65
    grad_output = torch.ones(1, 60, 64, device=device)
    grad_output[:, 0] = torch.inf
    _, (of_value, of_locations, of_weights) = gradients(ms_deform_attn, case, grad_output)
    columns = of_value.reshape(6, 8, 64)
    assert columns[:, 4:].isfinite().all() and not columns[:, :4].isfinite().all()
    assert of_locations[:, 1:].isfinite().all() and of_weights[:, 1:].isfinite().all()


@pytest.mark.cuda
def test_gradients_of_a_map_too_large_for_counters_in_shared_memory():
    case = make_case(1, 500, 1, 2, 4, [(4200, 4100)], dtype=torch.float32, device="cuda")
    grad_output = torch.randn(1, 500, 2, generator=torch.Generator().manual_seed(1)).to("cuda")
    _, added = gradients(ms_deform_attn, case, grad_output)
    torch.use_deterministic_algorithms(True)
    try:
        _, sorted_first = gradients(ms_deform_attn, case, grad_output)
    finally:
        torch.use_deterministic_algorithms(False)
    for grad, other in zip(sorted_first, added, strict=True):
        assert relative_error(grad, other) < 1e-5


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


def output_of(case):
    with torch.no_grad():
        return ms_deform_attn(*case)


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
@pytest.mark.parametrize(
    "sizes", [(0, 5, 2, 4, 3), (2, 0, 2, 4, 3), (2, 5, 0, 4, 3), (2, 5, 2, 0, 3), (2, 5, 2, 4, 0)], ids=str
)
def test_empty_sizes(sizes, device, deterministic):
    B, Q, G, C, P = sizes
    case = make_case(B, Q, G, C, P, [(3, 2), (2, 2)], dtype=torch.float32, device=device)
    output, grads = gradients(ms_deform_attn, case, torch.ones(B, Q, G * C, device=device))
    assert output.shape == (B, Q, G * C) and (output == 0).all()
    assert [grad.shape for grad in grads] == [case[0].shape, case[3].shape, case[4].shape]
    assert all((grad == 0).all() for grad in grads)


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_non_contiguous_inputs(dtype, device, deterministic):
    value, shapes, starts, locations, weights = make_case(
        *CASES["B3-Q17-G8-C32-P4-L4"], dtype=dtype, device=device
    )
    strided = (
        value.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        shapes.t().contiguous().t(),
        torch.stack([starts, starts], 1)[:, 0],
        locations.transpose(0, 3).contiguous().transpose(0, 3),
        torch.cat([weights, weights], -1)[..., : weights.shape[-1]],
    )
    assert not any(tensor.is_contiguous() for tensor in strided)
    assert torch.equal(ms_deform_attn(*strided), ms_deform_attn(value, shapes, starts, locations, weights))
    grad_output = torch.ones(1, device=device, dtype=dtype).expand(3, 17, 8 * 32)
    for actual, expected in zip(
        gradients(ms_deform_attn, strided, grad_output)[1],
        gradients(ms_deform_attn, (value, shapes, starts, locations, weights), grad_output.contiguous())[1],
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["B3-Q17-G8-C32-P4-L4", "pyramid", "eight-points"])
def test_tensors_at_odd_addresses(name, dtype, device):
    # A slice that begins one element into its storage cannot be read 16 bytes at a time.
    value, shapes, starts, locations, weights = make_case(
        *{**CASES, **MANY_ROWS}[name], dtype=dtype, device=device
    )

    def shifted(tensor):
        return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)

    expected = ms_deform_attn(value, shapes, starts, locations, weights)
    arguments = (shifted(locations), shifted(weights))
    assert torch.equal(ms_deform_attn(value, shapes, starts, *arguments), expected)
    torch.testing.assert_close(ms_deform_attn(shifted(value), shapes, starts, *arguments), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_levels_as_list_and_as_tensor_on_the_device(device):
    value, shapes, starts, locations, weights = make_case(
        *CASES["B3-Q17-G8-C32-P4-L4"], dtype=torch.float32, device=device
    )
    expected = ms_deform_attn(value, shapes, starts, locations, weights)
    for level_shapes, level_starts in (
        (shapes.tolist(), starts.tolist()),
        (shapes.tolist(), None),
        (shapes.int(), starts.int()),
        (shapes.to(device), starts.to(device)),
        (shapes.to(device), None),
        (shapes.tolist(), starts.to(device)),
        (shapes, starts.to(device)),
        (shapes.to(device), starts.tolist()),
        (shapes.to(device), starts),
    ):
        assert torch.equal(ms_deform_attn(value, level_shapes, level_starts, locations, weights), expected)
    assert torch.equal(
        ms_deform_attn(value, shapes, starts, locations, weights, 64), expected
    )  # mmcv's im2col_step


@pytest.mark.cuda
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=["in-order", "levels-in-another-order"])
@pytest.mark.parametrize("is_encoder", [False, True], ids=["decoder", "encoder"])
def test_level_tables_of_both_devices_mix_without_a_synchronisation(is_encoder, order):
    sizes = [(12, 15), (6, 8), (3, 4), (2, 2)]
    Q = sum(height * width for height, width in sizes) if is_encoder else 17
    value, shapes, _, locations, weights = make_case(2, Q, 8, 32, 4, sizes, dtype=torch.float32)
    starts = torch.zeros(4, dtype=torch.int64)
    row = 0
    for level in order:
        starts[level] = row
        row += int(shapes[level].prod())
    grad_output = torch.randn(2, Q, 256, generator=torch.Generator().manual_seed(3))
    expected = gradients(ms_deform_attn, (value, shapes, starts, locations, weights), grad_output)
    given = [tensor.cuda() for tensor in (value, locations, weights)]
    on_gpu = shapes.cuda(), starts.cuda()
    grad_output = grad_output.cuda()
    torch.cuda.synchronize()
    for level_shapes, level_starts in (
        (shapes.tolist(), on_gpu[1]),
        (shapes, on_gpu[1]),
        (on_gpu[0], starts.tolist()),
        (on_gpu[0], starts),
    ):
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = gradients(ms_deform_attn, (given[0], level_shapes, level_starts, *given[1:]), grad_output)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for one, other in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_level_starts_on_the_device_that_leave_value_yield_nan():
    value, shapes, starts, locations, weights = make_case(
        *CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.float32, device="cuda"
    )
    wrong = starts.cuda() + 1
    output = ms_deform_attn(value, shapes.tolist(), wrong, locations, weights)
    assert output.isnan().all()


@pytest.mark.cuda
def test_levels_on_the_device_that_leave_value_yield_nan():
    value, shapes, starts, locations, weights = make_case(
        *CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.float32, device="cuda"
    )
    wrong = shapes.clone()
    wrong[1] = torch.tensor([1 << 40, 1 << 40])
    output, grads = gradients(
        ms_deform_attn,
        (value, wrong.cuda(), starts.cuda(), locations, weights),
        torch.ones(2, 13, 60, device="cuda"),
    )
    assert (
        output.isnan().all() and grads[2][:, :, :, 1].isnan().all() and grads[2][:, :, :, 0].isfinite().all()
    )


@pytest.mark.cuda
def test_more_levels_than_travel_with_a_launch():
    case = make_case(1, 5, 2, 8, 2, [(3, 4)] * 20, dtype=torch.float32, device="cuda")
    expected = ms_deform_attn_reference(*case)
    torch.testing.assert_close(ms_deform_attn(*case), expected, rtol=1e-5, atol=1e-5)


def rejection_case():
    value, shapes, starts, locations, weights = make_case(
        2, 5, 2, 4, 3, [(3, 2), (2, 2)], dtype=torch.float32
    )
    return dict(value=value, level_shapes=shapes, level_starts=starts, locations=locations, weights=weights)


REJECTIONS = {
    "value-3d": (dict(value=torch.zeros(2, 10, 8)), r"value must be \[B, S, G, C\], got \[2, 10, 8\]"),
    "value-int": (
        dict(value=torch.zeros(2, 10, 2, 4, dtype=torch.int32)),
        "value must be float64, float32, float16 or bfloat16",
    ),
    "shapes-1d": (
        dict(level_shapes=torch.tensor([3, 2])),
        r"level_shapes must be \[L, 2\] \(height, width\), got \[2\]",
    ),
    "shapes-sum": (
        dict(level_shapes=torch.tensor([[3, 2], [1, 3]])),
        "sum of height . width over level_shapes must be S = 10, got 9",
    ),
    "shapes-zero": (
        dict(level_shapes=torch.tensor([[3, 2], [0, 2]])),
        r"level_shapes\[1\] must be a positive",
    ),
    "shapes-huge": (
        dict(level_shapes=torch.tensor([[3, 2], [2**40, 2**40]])),
        r"level_shapes\[1\] must be a positive",
    ),
    "starts-outside": (
        dict(level_starts=torch.tensor([0, 7])),
        "level 1 .rows 7 to 11. must lie within the S = 10 rows",
    ),
    "starts-negative": (dict(level_starts=torch.tensor([-1, 6])), "level 0 .rows -1 to 5. must lie within"),
    "starts-length": (dict(level_starts=torch.tensor([0])), r"level_starts must be \[L\] = \[2\], got \[1\]"),
    "locations-5d": (
        dict(locations=torch.zeros(2, 5, 2, 2, 3)),
        r"locations must be \[B, Q, G, L, P, 2\] = \[2, Q, 2, 2, P, 2\]",
    ),
    "locations-3-coordinates": (
        dict(locations=torch.zeros(2, 5, 2, 2, 3, 3)),
        r"locations must be .*got \[2, 5, 2, 2, 3, 3\]",
    ),
    "locations-batch": (
        dict(locations=torch.zeros(1, 5, 2, 2, 3, 2)),
        r"locations must be .*got \[1, 5, 2, 2, 3, 2\]",
    ),
    "weights-points": (
        dict(weights=torch.zeros(2, 5, 2, 2, 4)),
        r"weights must be \[B, Q, G, L, P\] = \[2, 5, 2, 2, 3\], got",
    ),
    "weights-device": (
        dict(weights=torch.zeros(2, 5, 2, 2, 3, device="meta")),
        "weights must be on value's device cpu, got meta",
    ),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejects(name):
    change, message = REJECTIONS[name]
    with pytest.raises(RuntimeError, match=message) as caught:
        ms_deform_attn(**(rejection_case() | change))
    assert "ms_deform_attn: " in str(caught.value)


def test_rejects_levels_that_are_no_numbers():
    with pytest.raises(
        TypeError, match="level_shapes must be an integer tensor or a sequence of integers, got 'abc'"
    ):
        ms_deform_attn(**(rejection_case() | dict(level_shapes="abc")))


def test_operator_itself_rejects_coordinates_of_another_type():
    case = rejection_case()
    with pytest.raises(RuntimeError, match="locations must be Float for value of type Float, got Double"):
        torch.ops.visdet.ms_deform_attn(*(case | dict(locations=case["locations"].double())).values())
    with pytest.raises(RuntimeError, match="weights must be Double for value of type Double, got Float"):
        torch.ops.visdet.ms_deform_attn(
            *(case | dict(value=case["value"].double(), locations=case["locations"].double())).values()
        )


@pytest.mark.parametrize("device", DEVICES)
def test_half_coordinates_are_converted_and_get_their_gradients_back(device):
    value, shapes, starts, locations, weights = make_case(
        *CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.float32, device=device
    )
    half = (value.half(), shapes, starts, locations.half(), weights.half())
    output, grads = gradients(ms_deform_attn, half, torch.ones(2, 13, 60, device=device))
    expected = ms_deform_attn(value.half(), shapes, starts, locations.half().float(), weights.half().float())
    assert torch.equal(output, expected)
    assert [grad.dtype for grad in grads] == [torch.float16] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_keeps_every_type(device):
    value, shapes, starts, locations, weights = make_case(
        *CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.float32, device=device
    )
    expected = ms_deform_attn(value, shapes, starts, locations, weights)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(ms_deform_attn(value, shapes, starts, locations, weights), expected)
        assert ms_deform_attn(value.bfloat16(), shapes, starts, locations, weights).dtype == torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_opcheck(dtype, device):
    value, shapes, starts, locations, weights = make_case(
        *CASES["B2-Q13-G3-C20-P4-L2"], dtype=dtype, device=device
    )
    for level_shapes, level_starts in ((shapes, starts), (shapes.to(device), starts.to(device))):
        arguments = (
            value.requires_grad_(),
            level_shapes,
            level_starts,
            locations.requires_grad_(),
            weights.requires_grad_(),
        )
        tolerance = dict(atol=1e-2, rtol=1e-2) if dtype == torch.bfloat16 else {}
        opcheck(torch.ops.visdet.ms_deform_attn.default, arguments, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_whole_with_a_dynamic_batch(device):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda v, x, w: ms_deform_attn(v, [(7, 5), (3, 4)], None, x, w).sin(), fullgraph=True, dynamic=None
    )
    for batch in (2, 3, 5):
        value, shapes, starts, locations, weights = make_case(
            batch, *CASES["B2-Q13-G3-C20-P4-L2"][1:], torch.float32, device
        )
        leaves = [tensor.clone().requires_grad_() for tensor in (value, locations, weights)]
        out = compiled(*leaves)
        torch.testing.assert_close(out, ms_deform_attn(value, shapes, starts, locations, weights).sin())
        expected = gradients(
            lambda *case: ms_deform_attn(*case).sin(),
            (value, shapes, starts, locations, weights),
            torch.ones_like(out),
        )[1]
        for actual, wanted in zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_exports():
    value, shapes, starts, locations, weights = make_case(*CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.float32)

    class Sampler(torch.nn.Module):
        def forward(self, value, locations, weights):
            return ms_deform_attn(value, [(7, 5), (3, 4)], [0, 35], locations, weights)

    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        Sampler(),
        (value, locations, weights),
        dynamic_shapes=({0: batch}, {0: batch}, {0: batch}),
        strict=False,
    )
    assert "visdet.ms_deform_attn" in str(program.graph)
    doubled = [torch.cat([tensor, tensor]) for tensor in (value, locations, weights)]
    torch.testing.assert_close(
        program.module()(*doubled), ms_deform_attn(doubled[0], shapes, starts, *doubled[1:])
    )


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_runs_in_an_aot_inductor_package(fused, tmp_path):
    value, _, _, locations, weights = make_case(*CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.float32)

    class Plain(torch.nn.Module):
        def forward(self, value, locations, weights):
            return ms_deform_attn(value * 2, [(7, 5), (3, 4)], [0, 35], locations, weights).relu()

    class Fused(torch.nn.Module):
        def forward(self, value, points, offsets, logits):
            return ms_deform_attn_fused(
                value * 2, [(7, 5), (3, 4)], [0, 35], points, offsets, logits, [3, 1]
            ).relu()

    generator = torch.Generator().manual_seed(2)
    arguments = (value, locations, weights)
    if fused:
        sizes = ((2, 13, 2, 4), (2, 13, 3, 4, 2), (2, 13, 3, 4))
        arguments = (value, *[torch.rand(size, generator=generator) for size in sizes])
    module = Fused() if fused else Plain()
    program = torch.export.export(module, arguments, strict=False)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "op.pt2"))
    packaged = torch._inductor.aoti_load_package(path)
    for scale in (1.0, 0.5):
        inputs = (arguments[0] * scale, *arguments[1:])
        torch.testing.assert_close(packaged(*inputs), module(*inputs))


def test_meta_tensors_give_shapes():
    case = make_case(*CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.bfloat16)
    out = ms_deform_attn(*[tensor.to("meta") for tensor in case])
    assert out.shape == (2, 13, 60) and out.dtype == torch.bfloat16 and out.device.type == "meta"


# Seven threads share the second case's two heads, so that none of them has the samples to copy the larger level.
@pytest.mark.parametrize(
    "sizes", [(2, 301, 4, 20, 4, [(9, 11), (5, 6)]), (1, 301, 2, 16, 4, [(20, 15), (9, 11)])]
)
def test_result_does_not_depend_on_the_number_of_threads(sizes):
    case = make_case(*sizes, dtype=torch.float32)
    B, Q, G, C = sizes[:4]
    grad_output = torch.randn(B, Q, G * C, generator=torch.Generator().manual_seed(3))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            results.append(gradients(ms_deform_attn, case, grad_output))
    finally:
        torch.set_num_threads(threads)
    for output, grads in results[1:]:
        assert torch.equal(output, results[0][0])
        assert all(torch.equal(grad, first) for grad, first in zip(grads, results[0][1], strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_mode_repeats_bit_for_bit(dtype, device):
    # Every query samples the same few texels, so the order of sums matters.
    value, shapes, starts, locations, weights = make_case(
        2, 400, 4, 32, 4, [(2, 3), (1, 2)], dtype=dtype, device=device
    )
    grad_output = torch.randn(2, 400, 128, generator=torch.Generator().manual_seed(3)).to(device)
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(ms_deform_attn, (value, shapes, starts, locations, weights), grad_output)
        for _ in range(3):
            again = gradients(ms_deform_attn, (value, shapes, starts, locations, weights), grad_output)
            assert torch.equal(again[0], first[0])
            assert all(torch.equal(grad, same) for grad, same in zip(again[1], first[1], strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    exact = [
        tensor.double().cpu() if tensor.is_floating_point() else tensor
        for tensor in (value, shapes, starts, locations, weights)
    ]
    expected = gradients(ms_deform_attn_reference, exact, grad_output.to(dtype).double().cpu())[1]
    for grad, wanted in zip(first[1], expected, strict=True):
        assert relative_error(grad, wanted) < max(TOLERANCE[dtype], 2e-5)


def test_saved_for_backward_is_the_inputs_and_nothing_else():
    value, shapes, starts, locations, weights = make_case(*CASES["B3-Q17-G8-C32-P4-L4"], dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        ms_deform_attn(
            value.requires_grad_(), shapes, starts, locations.requires_grad_(), weights.requires_grad_()
        )
    inputs = {tensor.data_ptr() for tensor in (value, shapes, starts, locations, weights)}
    assert {tensor.data_ptr() for tensor in saved} == inputs


@pytest.mark.cuda
def test_current_stream_and_graph_capture():
    case = make_case(*CASES["B3-Q17-G8-C32-P4-L4"], dtype=torch.float32, device="cuda")
    expected = ms_deform_attn(*case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ms_deform_attn(*case)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ms_deform_attn(*case)
    case[0].mul_(2)
    graph.replay()
    torch.testing.assert_close(out, expected * 2)


def wide(*shape, dtype=torch.float32):
    """Return zeros of any size that take no memory."""
    return torch.zeros((), dtype=dtype, device="cuda").expand(shape)


CUDA_LIMITS = {
    "rows": (
        dict(value=(1, 2**31, 1, 0), locations=(1, 1, 1, 1, 1, 2), weights=(1, 1, 1, 1, 1)),
        "value must have fewer than 2.31 rows S, got 2147483648",
    ),
    "samples": (
        dict(value=(1, 4, 1, 1), locations=(1, 2**20, 1, 1, 2**11, 2), weights=(1, 2**20, 1, 1, 2**11)),
        r"Q \* G \* L \* P must be under 2.31, got 1048576 \* 1 \* 2048",
    ),
    "channels": (
        dict(value=(1, 4, 2, 2**27), locations=(1, 1, 2, 1, 1, 2), weights=(1, 1, 2, 1, 1)),
        r"G \* C must be under 2.28, got 2 \* 134217728",
    ),
    "heads": (
        dict(value=(2**30, 4, 2, 1), locations=(2**30, 0, 2, 1, 1, 2), weights=(2**30, 0, 2, 1, 1)),
        r"B \* G must be under 2.31, got 1073741824 \* 2",
    ),
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", CUDA_LIMITS)
def test_cuda_size_limits(name):
    shapes, message = CUDA_LIMITS[name]
    arguments = {key: wide(*shape) for key, shape in shapes.items()}
    with pytest.raises(RuntimeError, match="ms_deform_attn: " + message):
        ms_deform_attn(arguments["value"], [(2, 2)], [0], arguments["locations"], arguments["weights"])


@pytest.mark.cuda
def test_cuda_size_limit_of_the_backward():
    # 2^30 queries of 3 points: a record numbers its query and point in 31 bits.
    with pytest.raises(RuntimeError, match=r"Q \* P must be under 2.31 .*got 715827882 \* 3"):
        torch.ops.visdet.ms_deform_attn_backward(
            wide(1, 715827882, 1),
            wide(1, 4, 1, 1),
            torch.tensor([[2, 2]]),
            torch.tensor([0]),
            wide(1, 715827882, 1, 1, 3, 2),
            wide(1, 715827882, 1, 1, 3),
            False,
        )


@pytest.mark.cuda(devices=2)
def test_second_gpu_while_the_first_is_current():
    case = make_case(*CASES["B3-Q17-G8-C32-P4-L4"], dtype=torch.float32)
    grad_output = torch.ones(3, 17, 256)
    expected, wanted = gradients(ms_deform_attn, case, grad_output)
    there = [tensor.to("cuda:1") for tensor in case]
    assert torch.cuda.current_device() == 0
    output, grads = gradients(ms_deform_attn, there, grad_output.to("cuda:1"))
    assert output.device == torch.device("cuda:1")
    torch.testing.assert_close(output.cpu(), expected, rtol=1e-5, atol=1e-5)
    for grad, same in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.cpu(), same, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_more_than_two_to_the_31_elements():
    # value has 2^31 + 2^20 elements in bfloat16 (4.3 GB); the last rows are sampled.
    G, C, H, W = 8, 128, 1024, 2050
    value = torch.zeros(1, H * W, G, C, dtype=torch.bfloat16, device="cuda")
    value[:, -1] = 3
    centre = torch.tensor([(W - 0.5) / W, (H - 0.5) / H], device="cuda").expand(1, 2, G, 1, 1, 2)
    out = ms_deform_attn(value, [(H, W)], [0], centre, torch.ones(1, 2, G, 1, 1, device="cuda"))
    torch.testing.assert_close(out, torch.full_like(out, 3), rtol=1e-2, atol=0)
