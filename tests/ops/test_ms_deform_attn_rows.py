"""ms_deform_attn on the sizes of encoders and decoders, which have kernels of their own."""

import math

import pytest
import torch
from attention_cases import CASES, DEVICES, TOLERANCE, make_case, output_of
from calls import gradients, relative_error

from visdet.ops import ms_deform_attn, ms_deform_attn_reference

# These calls have so many rows that a CUDA launch gives each row one group of threads at most. Some have the queries of
# an encoder: more regions and heads than a block owns, and a map narrower than a region. In others, a group does not
# divide the points and channels, or does not take a whole row at once.
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
    B, *sizes = MANY_ROWS[name]
    B = B if device == "cuda" else 2  # On the CPU every image is treated alike.
    case = make_case(B, *sizes, dtype=dtype, device=device)
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
