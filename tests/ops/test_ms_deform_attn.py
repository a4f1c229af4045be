"""ms_deform_attn: by hand, and against the plain-torch definition."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from calls import (
    assert_matches,
    assert_near,
    changed_calls,
    exact,
    gradients,
    in_order,
    relative_error,
    without_synchronisation,
)
from golden import golden, under
from path_cases import launches_of_attention, of_two_types
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz.attention import attention_sizes, error_factor, level_tables
from tests.fuzz.problem import (
    HALVES,
    WIDE_TYPES,
    Draw,
    Operator,
    Problem,
    Seeded,
    generator_of,
    gradient_sum,
    largest,
    rand,
    row_sum,
    wide_of,
)
from tests.fuzz.sampling import longest_side, near_whole, starts_of
from visdet.ops import feature_maps_format, ms_deform_attn, ms_deform_attn_reference

# Largest |difference| / largest |value| of the output against the float64 reference on the same (rounded)
# values. The 16-bit outputs are rounded once, to a relative 2^-11 and 2^-8 of themselves; gradients of
# value likewise.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def make_case(B, Q, G, C, P, shapes, dtype=torch.float64, device="cpu", seed=0, spread=0.15):
    """Return value, shapes, starts, locations (some outside), weights; positions keep off texel centres."""
    draw, wide = Seeded(seed), wide_of(dtype)
    level_shapes = torch.tensor(shapes, dtype=torch.int64).reshape(-1, 2)
    starts, S = starts_of(level_shapes)
    L = len(shapes)
    value = draw.normal(B, S, G, C)
    locations = draw.uniform(B, Q, G, L, P, 2) * (1 + 2 * spread) - spread
    size = level_shapes.flip(1)[None, None, None, :, None].double()
    pixels = locations * size - 0.5
    fraction = pixels - pixels.floor()
    locations = (pixels.floor() + fraction.clamp(0.05, 0.95) + 0.5) / size
    weights = draw.normal(B, Q, G, L, P)
    return (
        value.to(device, dtype),
        level_shapes,
        starts,
        locations.to(device, wide),
        weights.to(device, wide),
    )


PYRAMID = [(12, 15), (6, 8), (3, 4), (2, 2)]
CASES = {
    "B2-Q13-G3-C20-P4-L2": (2, 13, 3, 20, 4, [(7, 5), (3, 4)]),
    "B1-Q5-G1-C30-P3-L1": (1, 5, 1, 30, 3, [(6, 9)]),
    "B3-Q17-G8-C32-P4-L4": (3, 17, 8, 32, 4, PYRAMID),
    "B2-Q9-G2-C71-P5-L3": (2, 9, 2, 71, 5, [(5, 4), (1, 7), (3, 1)]),
    "B1-Q33-G2-C64-P8-L3": (1, 33, 2, 64, 8, [(8, 8), (4, 5), (2, 3)]),
    "B1-Q3-G1-C1025-P1-L2": (1, 3, 1, 1025, 1, [(4, 4), (2, 2)]),
    "B2-Q3-G3-C20-P2-L2": (2, 3, 3, 20, 2, [(7, 5), (3, 4)]),  # fewer samples than texels
    "B65-Q2-G1-C4-P1-L1": (65, 2, 1, 4, 1, [(3, 3)]),
    "B1-Q4-G2-C8-P30-L3": (1, 4, 2, 8, 30, [(9, 4), (4, 4), (2, 2)]),
}


def output_of(case):
    with torch.no_grad():
        return ms_deform_attn(*case)


def locations_around(draw: Draw, shapes: Tensor, B: int, Q: int, G: int, P: int) -> Tensor:
    """Return locations [B, Q, G, L, P, 2] (x, y) in 0..1.

    They are spread, around a position, in one cell, on borders or centres of texels, or random numbers.
    """
    L = len(shapes)
    size = shapes.flip(-1).double()[:, None]  # [L, 1, 2]
    kind = draw.random.random()
    if kind < 0.5:
        locations = draw.uniform(-0.2, 1.2, B, Q, G, L, P, 2)
    elif kind < 0.65:  # around a place of the query's own, some pixels away
        centers = draw.uniform(0, 1, 1, Q, 1, 1, 1, 2)
        centers = centers.sort(1).values if draw.chance(0.5) else centers
        moves = torch.randn((B, Q, G, L, P, 2), generator=draw.generator, dtype=torch.float64)
        locations = centers + moves * draw.pick(0.3, 3.0) / size
    elif kind < 0.75:  # all in one cell
        locations = draw.uniform(0, 1, 1, 1, 1, L, 1, 2) + draw.uniform(0, 1e-3, B, Q, G, L, P, 2) / size
    elif kind < 0.9:  # texel centres and borders
        half_texels = draw.uniform(0, 1, B, Q, G, L, P, 2) * (2 * size + 6)
        locations = (half_texels.floor() - 3) / (2 * size)
    else:
        locations = draw.numbers(B, Q, G, L, P, 2)
    return draw.with_bad_numbers(locations)


def _draw(draw: Draw) -> Problem:
    shapes, B, Q, G, C, P = attention_sizes(draw)
    L = len(shapes)
    value = draw.values(B, int(shapes.prod(1).sum()), G, C)
    wide = wide_of(value.dtype)
    locations = locations_around(draw, shapes, B, Q, G, P)
    types = (wide, wide, torch.float64, torch.float32)
    locations = draw.place(locations, draw.dtype(*types), not draw.has_bad_numbers)
    weights = draw.values(B, Q, G, L, P, dtype=draw.dtype(wide, wide, *HALVES))
    given_shapes, given_starts, starts = level_tables(draw, shapes)
    arguments = {
        "value": value,
        "level_shapes": given_shapes,
        "level_starts": given_starts,
        "locations": locations,
        "weights": weights,
    }
    near = near_whole(locations.to(wide), shapes.flip(-1)[:, None].to(locations.device))
    draw.leave_out(locations, near)
    return Problem(
        arguments,
        differentiable=("value", "locations", "weights"),
        positions=("locations",),
        reference_arguments={"level_shapes": shapes, "level_starts": starts},
        wide=wide,
        error_factor=error_factor(shapes, Q * P),
        skip={"locations": near},
        may_refuse="level_shapes is empty or has no rows" if L == 0 else "",
    )


def _bounds(problem: Problem, bounds: dict[str, float]) -> None:
    """Bound sums by the largest value, because errors of positions count in full near a corner of small weight."""
    shapes = problem.reference_arguments["level_shapes"]
    side = longest_side(shapes)
    peak, weights = largest(problem.arguments["value"]), problem.arguments["weights"]
    of_weights = largest(weights)
    bounds["output"] = peak * row_sum(weights, 2)
    if "value" in bounds:
        per_texel = of_weights * bounds.get("grad_peak", 0.0)
        bounds["value"] = max(bounds["value"], per_texel)
    if "weights" in bounds:
        bounds["weights"] = max(bounds["weights"], peak * gradient_sum(bounds))
    if "locations" in bounds:
        bounds["locations"] = 4 * side * peak * gradient_sum(bounds) * of_weights


def _of_sizes(B: int, Q: int) -> Problem:
    given = {
        "value": rand(B, 12, 2, 4),
        "level_shapes": [(3, 4)],
        "level_starts": None,
        "locations": rand(B, Q, 2, 1, 2, 2),
        "weights": rand(B, Q, 2, 1, 2),
    }
    return Problem(given, ("value", "locations", "weights"))


OPERATORS = (
    Operator(
        "ms_deform_attn",
        ms_deform_attn,
        _draw,
        ms_deform_attn_reference,
        _bounds,
        launches=launches_of_attention(),
        reads_beside=("value",),
        scatters_beside=("weights",),
        spoiled={
            "value": ("rank", 0, 1, 2),
            "locations": ("rank", 0, 1, 2, 3, 4, 5),
            "weights": ("rank", 0, 1, 2, 3, 4),
            "level_shapes": ("rank", 1),
        },
        of_size=(lambda n: _of_sizes(2, n), lambda n: _of_sizes(n, 3)),
    ),
)


on_cuda = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])


def assert_matches_reference(case, of_value, of_coordinates):
    """Compare output and gradients with those in float64, within an error of value and one of other gradients."""
    tolerances = of_value, of_value, of_coordinates, of_coordinates
    assert_matches(ms_deform_attn, ms_deform_attn_reference, case, *tolerances)


of_all_types = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@of_all_types
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name, dtype, device, deterministic):
    case = make_case(*CASES[name], dtype=dtype, device=device)
    assert_matches_reference(case, TOLERANCE[dtype], 1e-12 if dtype == torch.float64 else 2e-5)


@pytest.mark.parametrize("dtype", WIDE_TYPES, ids=str)
@pytest.mark.parametrize("P", [1, 2, 3, 5, 7, 8, 12, 15, 17, 20, 31, 33, 65])
def test_any_number_of_samples_leaves_the_neighbours_alone(P, dtype):
    # CPU loops run to whole registers: past a row's samples they read the next row's, which here are no numbers.
    value, shapes, starts, locations, weights = make_case(1, 5, 3, 4, P, [(7, 5)], dtype=dtype)
    alone = [locations[:, ::2], weights[:, ::2]]
    locations[:, 1::2], weights[:, 1::2] = math.nan, math.inf
    grad_output = torch.randn(1, 5, 12, generator=generator_of(1), dtype=dtype)
    output, grads = gradients(ms_deform_attn, (value, shapes, starts, locations, weights), grad_output)
    expected, expected_grads = gradients(
        ms_deform_attn_reference, (value, shapes, starts, *alone), grad_output[:, ::2]
    )
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    of_value, *others = grads
    found = output[:, ::2], of_value, *(grad[:, ::2] for grad in others)
    assert_near(found, (expected, *expected_grads), tolerance)
    assert not any(grad[:, 1::2].any() for grad in others)


def test_golden_vectors():
    arrays = under(golden("modules"), "ms_deform_attn")
    case = [
        arrays[f"input/{name}"]
        for name in ("value", "spatial_shapes", "level_start_index", "locations", "weights")
    ]
    output, grads = gradients(ms_deform_attn, case, arrays["input/grad_output"])
    names = ("output", "grad_value", "grad_locations", "grad_weights")
    assert_near((output, *grads), [arrays[f"output/{name}"] for name in names], 1e-12)


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


@pytest.mark.cuda
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=["in-order", "levels-in-another-order"])
@pytest.mark.parametrize("is_encoder", [False, True], ids=["decoder", "encoder"])
def test_level_tables_of_both_devices_mix_without_a_synchronisation(is_encoder, order):
    Q = sum(height * width for height, width in PYRAMID) if is_encoder else 17
    value, shapes, _, locations, weights = make_case(2, Q, 8, 32, 4, PYRAMID, dtype=torch.float32)
    starts = torch.zeros(4, dtype=torch.int64)
    row = 0
    for level in order:
        starts[level] = row
        row += int(shapes[level].prod())
    grad_output = torch.rand(2, Q, 256)
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
        with without_synchronisation():
            found = gradients(ms_deform_attn, (given[0], level_shapes, level_starts, *given[1:]), grad_output)
        assert_close(found, expected, rtol=1e-4, atol=1e-4, check_device=False)


@pytest.mark.cuda
def test_levels_on_the_device_that_leave_value_yield_nan():
    value, shapes, starts, locations, weights = make_case(
        *CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.float32, device="cuda"
    )
    assert ms_deform_attn(value, shapes.tolist(), starts.cuda() + 1, locations, weights).isnan().all()
    shapes[1] = torch.tensor([1 << 40, 1 << 40])
    output, grads = gradients(ms_deform_attn, (value, shapes.cuda(), starts.cuda(), locations, weights))
    assert output.isnan().all() and grads[2][:, :, :, 1].isnan().all()
    assert grads[2][:, :, :, 0].isfinite().all()


@pytest.mark.cuda
def test_more_levels_than_travel_with_a_launch():
    case = make_case(1, 5, 2, 8, 2, [(3, 4)] * 20, dtype=torch.float32, device="cuda")
    expected = ms_deform_attn_reference(*case)
    assert_close(ms_deform_attn(*case), expected, rtol=1e-5, atol=1e-5)


def rejection_case():
    value, shapes, starts, locations, weights = make_case(
        2, 5, 2, 4, 3, [(3, 2), (2, 2)], dtype=torch.float32
    )
    return dict(value=value, level_shapes=shapes, level_starts=starts, locations=locations, weights=weights)


REJECTIONS = {
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
    "shapes-text": (dict(level_shapes="abc"), "level_shapes must be an integer tensor .*'abc'"),
    "shapes-fraction": (dict(level_shapes=[(3, 2), (2, 2.5)]), "level_shapes must be an integer"),
    "shapes-ragged": (dict(level_shapes=[(3, 2), (2,)]), "level_shapes must be an integer"),
    "shapes-float": (dict(level_shapes=torch.ones(2, 2)), "level_shapes must be an integer"),
    "shapes-none": (dict(level_shapes=[], level_starts=None), r"level_shapes must be \[L, 2\].*got \[0\]"),
    "shapes-number": (dict(level_shapes=3), r"level_shapes must be \[L, 2\].*got \[\]"),
    "starts-fraction": (dict(level_starts=[0.0, 6.0]), "level_starts must be an integer"),
    "starts-float": (dict(level_starts=torch.zeros(2)), "level_starts must be an integer"),
}


REFUSED = changed_calls(ms_deform_attn, rejection_case(), REJECTIONS.values())


def test_tables_of_feature_maps_are_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        tables = feature_maps_format([[torch.rand(1, 2, 4, 3, 5)]])[1:]
    assert all(table.device.type == "cpu" for table in tables)


# These calls have so many rows that a CUDA launch gives each row one group of threads at most. Some have the queries of
# an encoder: more regions and heads than a block owns, and a map narrower than a region. In others, a group does not
# divide the points and channels, or does not take a whole row at once.
THIN = [(17, 15), (1, 7), (3, 1)]
FOUR_THIN = [*THIN, (2, 2)]
FOUR_LEVELS = [(17, 15), (1, 7), (3, 2), (2, 2)]
WIDE = [(40, 34), (20, 17), (4, 3)]
FEW_TEXELS = [(6, 5), (1, 1), (2, 3)]
FIVE_LEVELS = [*FEW_TEXELS, (1, 4), (3, 1)]
MANY_ROWS = {
    "_pyramid": (17, 265, 8, 32, 4, THIN),
    "_pyramid-whole-passes": (17, 269, 8, 32, 4, FOUR_THIN),
    "_pyramid-whole-passes-wide": (9, 269, 8, 64, 4, FOUR_THIN),
    "_pyramid-two-passes": (17, 272, 8, 32, 8, FOUR_LEVELS),
    "_pyramid-known-columns": (17, 272, 8, 32, 4, FOUR_LEVELS),
    "_pyramid-known-columns-twelve": (17, 268, 8, 32, 4, [(17, 15), (1, 7), (3, 2)]),
    "_pyramid-known-columns-twelve-on-one": (17, 255, 8, 32, 12, [(17, 15)]),
    "_pyramid-half-as-wide": (9, 272, 16, 16, 4, FOUR_LEVELS),  # also 256 channels
    "_pyramid-three-points": (17, 265, 8, 20, 3, THIN),
    "_pyramid-thirty-samples": (17, 265, 8, 30, 10, THIN),
    "_pyramid-no-samples": (17, 265, 8, 32, 0, THIN),
    "_pyramid-three-channels": (17, 265, 8, 3, 4, THIN),
    "_pyramid-wide": (17, 54, 8, 300, 4, [(6, 8), (2, 3)]),
    "_pyramid-regions": (9, 1712, 16, 8, 4, WIDE),
    # In which a warp on CUDA has more turns than it works out the queries of at once, in 16 bit, too.
    "_pyramid-known-columns-many-turns": (16, 1716, 8, 32, 4, [*WIDE, (2, 2)]),
    "three-points": (17, 260, 8, 20, 3, FEW_TEXELS),
    "eight-points": (17, 260, 8, 32, 8, FEW_TEXELS),
    "wide": (17, 40, 8, 300, 4, [(3, 4), (1, 2)]),
    "one-head": (70, 260, 1, 32, 8, [(6, 5), (1, 2), (2, 3)]),
    # Rows that several groups share, in bfloat16 four, two and one.
    "forty-queries": (17, 40, 8, 32, 4, FEW_TEXELS),
    "eighty-queries": (17, 80, 8, 32, 4, FEW_TEXELS),
    "two-hundred-queries": (17, 200, 8, 32, 4, FEW_TEXELS),
    # Few rows again, with more samples than are prepared at a time, of wider and of narrower heads.
    "five-levels": (3, 150, 4, 32, 4, FIVE_LEVELS),
    "five-levels-wide": (3, 30, 4, 128, 8, FIVE_LEVELS),
    "narrow": (3, 300, 4, 12, 4, [(6, 5), (2, 3)]),
}


@of_all_types
@pytest.mark.parametrize("name", MANY_ROWS)
def test_many_rows_match_reference(name, dtype, device):
    B, *sizes = MANY_ROWS[name]
    B = B if device == "cuda" else 2  # On the CPU every image is treated alike.
    case = make_case(B, *sizes, dtype=dtype, device=device)
    assert relative_error(output_of(case), ms_deform_attn_reference(*exact(case))) < TOLERANCE[dtype]


def test_an_encoders_queries_with_other_levels(device):
    """The levels on the device, and levels that share rows, so that the queries are no texels of theirs."""
    value, shapes, starts, locations, weights = make_case(
        *MANY_ROWS["_pyramid"], dtype=torch.float32, device=device
    )
    expected = ms_deform_attn(value, shapes, starts, locations, weights)
    there, shared = shapes.to(device), torch.tensor([0, 3, 200])
    assert torch.equal(ms_deform_attn(value, there, starts.to(device), locations, weights), expected)
    reference = ms_deform_attn_reference(*exact((value, shapes, shared, locations, weights)))
    for level_shapes, level_starts in ((shapes, shared), (there, shared.to(device))):
        output = ms_deform_attn(value, level_shapes, level_starts, locations, weights)
        assert relative_error(output, reference) < TOLERANCE[torch.float32]


@pytest.mark.cuda
@of_two_types
def test_an_encoders_levels_known_to_the_host_or_not(dtype):
    """Levels of two columns or more: the host then chooses a kernel that it cannot choose for levels on the device."""
    value, shapes, starts, *others = make_case(
        *MANY_ROWS["_pyramid-known-columns"], dtype=dtype, device="cuda"
    )
    on_device = ms_deform_attn(value, shapes.cuda(), starts.cuda(), *others)
    # The two kernels add a row's samples in another order.
    assert_close(ms_deform_attn(value, shapes, starts, *others), on_device)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@of_two_types
@pytest.mark.parametrize(
    "name", ["_pyramid", "_pyramid-known-columns", "_pyramid-known-columns-twelve", "one-head"]
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
    "_pyramid": (3, 265, 8, 32, 4, THIN),
    "thirty-samples": (2, 265, 2, 30, 10, THIN),
    "one-pack-of-channels": (2, 265, 3, 4, 3, THIN),
    "sixteen-packs": (2, 265, 2, 64, 2, THIN),
    "most-channels": (2, 265, 2, 128, 3, THIN),
    "too-many-channels": (2, 54, 2, 300, 4, [(6, 8), (2, 3)]),
    "wide-map": (1, 6000, 2, 8, 5, [(40, 150)]),
    "small-maps": (70, 6, 4, 16, 4, [(2, 2), (1, 1), (1, 1)]),
}


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_gradients_of_an_encoder(name, dtype, device, deterministic):
    # float32 rounds a position on 150 columns by 1e-5 texels.
    case = make_case(*ENCODERS[name], dtype=dtype, device=device)
    assert_matches_reference(case, max(TOLERANCE[dtype], 2e-5), 5e-5)


@on_cuda
def test_gradients_of_an_encoders_queries_with_other_levels(device):
    """The levels on the device, and levels that share rows and leave some out."""
    value, shapes, starts, locations, weights = make_case(
        *ENCODERS["_pyramid"], dtype=torch.float32, device=device
    )
    there, shared = shapes.to(device), torch.tensor([0, 3, 200])
    for tables in ((there, starts.to(device)), (shapes, shared), (there, shared.to(device))):
        assert_matches_reference((value, *tables, locations, weights), 1e-5, 2e-5)
    # A level that does not lie within S: its own samples' gradients say so, those of the other levels are right.
    outside = torch.tensor([0, 264, 262])
    grad_output = torch.ones(3, 265, 256, device=device)
    _, grads = gradients(ms_deform_attn, (value, there, outside.to(device), locations, weights), grad_output)
    for grad in grads[1:]:
        assert grad[:, :, :, 1].isnan().all() and grad[:, :, :, ::2].isfinite().all()
    assert grads[0].isfinite().all()


@on_cuda
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e30])
def test_gradients_of_an_encoders_position_that_is_no_number(bad, device):
    value, shapes, starts, locations, weights = make_case(
        *ENCODERS["_pyramid"], dtype=torch.float32, device=device
    )
    without = weights.clone()
    without[:, ::3, :, 0, 1] = 0
    expected = gradients(ms_deform_attn, (value, shapes, starts, locations, without), value.flatten(2))[1]
    locations[:, ::3, :, 0, 1, 1] = bad
    weights[:, ::3, :, 0, 1] = math.nan
    grads = gradients(ms_deform_attn, (value, shapes, starts, locations, weights), value.flatten(2))[1]
    assert (grads[1][:, ::3, :, 0, 1] == 0).all() and (grads[2][:, ::3, :, 0, 1] == 0).all()
    assert_close(grads[0], expected[0], rtol=1e-4, atol=1e-4)
    assert_close(grads[1][:, 1::3], expected[1][:, 1::3])


@on_cuda
def test_gradients_of_a_large_map_with_few_samples_a_cell(device, deterministic):
    case = make_case(1, 16000, 1, 4, 16, [(250, 240)], dtype=torch.float32, device=device)
    assert_matches_reference(case, 1e-4, 1e-4)  # of a position on 250 texels; float32 rounds it


@pytest.mark.parametrize("dtype", WIDE_TYPES, ids=str)
@pytest.mark.parametrize("extent", [0.0, 0.01, 0.3])
def test_gradients_of_a_crowd_of_samples(extent, dtype, device, deterministic):
    # 12000 samples a level in one cell, in a few and in a hundred: more than a block sorts at once.
    case = list(make_case(1, 3000, 1, 4, 4, [(20, 30), (5, 6)], dtype=dtype, spread=0.0))
    size = case[1].flip(1)[None, None, None, :, None]
    pixels = (case[3] * extent + 0.37).double() * size - 0.5
    case[3] = ((pixels.floor() + (pixels - pixels.floor()).clamp(0.05, 0.95) + 0.5) / size).to(dtype)
    case = [one.to(device) if one.is_floating_point() else one for one in case]
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    assert_matches_reference(case, tolerance, tolerance)


@of_two_types
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
    _, added = gradients(ms_deform_attn, case)
    with in_order():
        _, sorted_first = gradients(ms_deform_attn, case)
    assert_near(sorted_first, added, 1e-5)


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


@pytest.mark.cuda
def test_more_than_two_to_the_31_elements():
    # value has 2^31 + 2^20 elements in bfloat16 (4.3 GB); the last rows are sampled.
    G, C, H, W = 8, 128, 1024, 2050
    value = torch.zeros(1, H * W, G, C, dtype=torch.bfloat16, device="cuda")
    value[:, -1] = 3
    centre = torch.tensor([(W - 0.5) / W, (H - 0.5) / H], device="cuda").expand(1, 2, G, 1, 1, 2)
    out = ms_deform_attn(value, [(H, W)], [0], centre, torch.ones(1, 2, G, 1, 1, device="cuda"))
    assert_close(out, torch.full_like(out, 3), rtol=1e-2, atol=0)


@pytest.mark.cuda
def test_threads_do_not_take_shared_memory_from_one_another():
    """The limit of a kernel holds for all threads, each of which knows what it has asked for."""
    value = torch.randn(2, 21760, 8, 32, device="cuda", dtype=torch.bfloat16)
    shapes = [(128, 128), (64, 64), (32, 32), (16, 16)]

    def attend(queries):
        locations = torch.rand(2, queries, 8, 4, 4, 2, device="cuda")
        return ms_deform_attn(value, shapes, None, locations, torch.rand(locations.shape[:-1], device="cuda"))

    # On an H200 or H100, the numbers of queries need 10, 68, 53 and 68 KB.
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for pool, queries in ((one, 300), (other, 2000), (one, 1600), (other, 2000)):
            assert pool.submit(attend, queries).result(timeout=60).isfinite().all()
