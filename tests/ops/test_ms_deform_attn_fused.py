"""ms_deform_attn_fused: by hand, and against the plain-torch definition."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from calls import assert_matches, changed_calls, exact, relative_error
from path_cases import launches_of_fused_attention, of_two_types
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz.attention import attention_sizes, error_factor, level_tables
from tests.fuzz.problem import HALVES, Draw, Operator, Problem, Seeded, gradient_sum, largest, rand, wide_of
from tests.fuzz.sampling import longest_side, near_whole, starts_of
from visdet.ops import ms_deform_attn, ms_deform_attn_fused, ms_deform_attn_fused_reference

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
    draw, inputs = Seeded(seed), inputs or dtype
    level_shapes = torch.tensor(shapes, dtype=torch.int64).reshape(-1, 2)
    starts, S = starts_of(level_shapes)
    L, K = len(shapes), sum(num_points)
    value = draw.normal(B, S, G, C)
    reference_points = draw.uniform(B, Q, L, references)
    reference_points[..., 2:] = reference_points[..., 2:] * 0.5 + 0.25
    offsets = draw.normal(B, Q, G, K, 2) * 2
    logits = draw.normal(B, Q, G, K)
    reference_points, offsets = reference_points.to(wide_of(dtype)), offsets.to(inputs)
    offsets = _off_texel_centres(level_shapes, reference_points.double(), offsets, num_points)
    return (
        value.to(device, dtype),
        level_shapes,
        starts,
        reference_points.to(device),
        offsets.to(device),
        logits.to(device, inputs),
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


THREE_LEVELS = [(8, 7), (2, 7), (3, 1)]
CASES = {
    "B2-Q13-G3-C20-P4-4": (2, 13, 3, 20, [4, 4], [(7, 5), (3, 4)]),
    "B1-Q5-G1-C30-P3": (1, 5, 1, 30, [3], [(6, 9)]),
    "B3-Q17-G8-C32-P4-4-4-4": (3, 17, 8, 32, [4, 4, 4, 4], [(12, 15), (6, 8), (3, 4), (2, 2)]),
    "B2-Q40-G2-C32-P8-4-12": (2, 40, 2, 32, [8, 4, 12], [(6, 5), (1, 4), (3, 2)]),
    "B2-Q9-G2-C71-P3-6-3": (2, 9, 2, 71, [3, 6, 3], [(5, 4), (1, 7), (3, 1)]),
    "B1-Q55-G2-C64-P8-0-1": (1, 55, 2, 64, [8, 0, 1], [(6, 6), (3, 5), (2, 2)]),  # Q = S
    "B2-Q73-G3-C32-P3-6-3": (2, 73, 3, 32, [3, 6, 3], THREE_LEVELS),  # Q = S
    # More samples than the CPU locates at a time, with and without room for whole registers of them.
    "B1-Q7-G2-C16-P11-11-11": (1, 7, 2, 16, [11, 11, 11], THREE_LEVELS),
    "B1-Q7-G2-C16-P16-17-15": (1, 7, 2, 16, [16, 17, 15], THREE_LEVELS),
    "B1-Q3-G1-C600-P1-2": (1, 3, 1, 600, [1, 2], [(4, 4), (2, 2)]),
    "B40-Q2-G1-C4-P1": (40, 2, 1, 4, [1], [(3, 3)]),
    "B1-Q4-G2-C8-P40-30-1": (1, 4, 2, 8, [40, 30, 1], [(9, 4), (4, 4), (2, 2)]),
}


def _draw_fused(draw: Draw) -> Problem:
    shapes, B, Q, G, C, P = attention_sizes(draw)
    L = len(shapes)
    value = draw.values(B, int(shapes.prod(1).sum()), G, C)
    wide = wide_of(value.dtype)
    points = P if draw.chance(0.5) else [draw.size(6) for _ in range(L)]
    counts = [points] * L if isinstance(points, int) else points
    K = sum(counts)
    D = draw.pick(2, 4)
    shared_batch, shared_level = draw.chance(0.2), draw.chance(0.3) and L > 0
    reference_points = draw.uniform(-0.1, 1.1, 1 if shared_batch else B, Q, 1 if shared_level else L, D)
    offsets = draw.numbers(B, Q, G, K, 2)
    kind = draw.random.random()
    if kind < 0.15:
        offsets = (offsets * 2).round() / 2
    elif kind < 0.25:
        offsets = offsets * 1e-3
    logits = draw.numbers(B, Q, G, K)
    if draw.has_bad_numbers and K:
        logits = torch.where(draw.uniform(0, 1, *logits.shape) < 0.1, -torch.inf, logits)
    narrow = draw.dtype(wide, value.dtype, *HALVES)
    offsets = draw.place(offsets, narrow, not draw.has_bad_numbers, bad=0.5)
    logits = draw.place(logits, narrow if draw.chance(0.8) else draw.dtype(), bad=0.5)
    types = (
        (wide,) if shared_batch or shared_level else (wide, wide, *HALVES)
    )  # a sum is rounded for each term
    reference_points = draw.place(reference_points, draw.dtype(*types), bad=0.5)
    given_shapes, given_starts, starts = level_tables(draw, shapes)
    level_of = torch.repeat_interleave(torch.arange(L), torch.tensor(counts, dtype=torch.int64))
    near = _near_whole_of_fused(shapes, level_of, counts, reference_points, offsets, wide)
    draw.leave_out(offsets, near)
    return Problem(
        {
            "value": value,
            "level_shapes": given_shapes,
            "level_starts": given_starts,
            "reference_points": reference_points,
            "offsets": offsets,
            "logits": logits,
            "num_points": points,
        },
        differentiable=("value", "reference_points", "offsets", "logits"),
        positions=("reference_points", "offsets", "logits"),
        reference_arguments={"level_shapes": shapes, "level_starts": starts, "num_points": counts},
        wide=wide,
        error_factor=error_factor(shapes, Q * P),
        skip={"offsets": near, "reference_points": bool(near.any())},
        may_refuse="there are no levels" if L == 0 else "",
    )


def _near_whole_of_fused(
    shapes: Tensor,
    level_of: Tensor,
    counts: list[int],
    reference_points: Tensor,
    offsets: Tensor,
    wide: torch.dtype,
) -> Tensor:
    """Return a mask [B, Q, G, K, 2], True where a sample's position is near a whole number of pixels."""
    if offsets.numel() == 0:
        return torch.zeros(offsets.shape, dtype=torch.bool)
    reference = (
        reference_points.detach().to(wide).double().cpu().expand(offsets.shape[0], -1, len(shapes), -1)
    )
    moves = offsets.detach().to(wide).double().cpu()
    sizes = shapes.flip(-1).double()[level_of]  # [K, 2]
    centers = reference[..., :2][:, :, level_of][:, :, None]  # [B, Q, 1, K, 2]
    if reference.shape[-1] == 4:
        scale = 0.5 / torch.tensor(counts, dtype=torch.float64)[level_of, None]
        moves = moves * reference[..., 2:][:, :, level_of][:, :, None] * scale
    else:
        moves = moves / sizes
    return near_whole(centers + moves, sizes)


def _fused_reference(reference_points: Tensor, level_shapes: Tensor, value: Tensor, **others: Any) -> Tensor:
    expanded = reference_points.expand(value.shape[0], -1, len(level_shapes), -1)
    return ms_deform_attn_fused_reference(
        value=value, level_shapes=level_shapes, reference_points=expanded, **others
    )


def _fused_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    given = problem.arguments
    value = given["value"]
    shapes = problem.reference_arguments["level_shapes"]
    side = longest_side(shapes)
    sample = largest(value) * gradient_sum(bounds)  # a product of a sample and a gradient
    reach = max(1.0, largest(given["reference_points"]), largest(given["offsets"]))
    exponent = 1 + largest(given["logits"], 1e6)  # off by its epsilon times its size
    reach *= exponent
    bounds["output"] = largest(value) * reach
    # A box of 1e30 with an offset of zero has a position, and a gradient of that size.
    scale = max(reach, largest(given["reference_points"], 1e38))
    per_location = 4 * side * sample * scale * exponent
    heads = max(1, value.shape[2])
    everywhere = max(1, value.shape[0] * max(1, len(shapes)))  # shared by the batch and the levels
    for name, bound in (
        ("value", max(bounds.get("value", 0.0), bounds.get("grad_peak", 0.0)) * exponent),
        ("logits", 2 * sample * reach),
        ("offsets", per_location),
        ("reference_points", per_location * heads * everywhere * reach),
    ):
        if name in bounds:
            bounds[name] = bound


OPERATORS = (
    Operator(
        "ms_deform_attn_fused",
        ms_deform_attn_fused,
        _draw_fused,
        _fused_reference,
        _fused_bounds,
        launches=launches_of_fused_attention(),
        reads_beside=("value",),
        scatters_beside=("logits",),
        spoiled={
            "value": ("rank", 0, 1, 2),
            "offsets": ("rank", 0, 1, 2, 3, 4),
            "logits": ("rank", 0, 1, 2, 3),
            "level_shapes": ("rank", 1),
        },
        aliases=("ms_deform_attn",),
        of_size=(
            lambda n: Problem(
                {
                    "value": rand(2, 16, 2, 4),
                    "level_shapes": [(3, 4), (2, 2)],
                    "level_starts": None,
                    "reference_points": rand(2, n, 2, 4),
                    "offsets": rand(2, n, 2, 4, 2),
                    "logits": rand(2, n, 2, 4),
                    "num_points": 2,
                },
                ("value", "reference_points", "offsets", "logits"),
            ),
        ),
    ),
)


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


of_points_and_boxes = pytest.mark.parametrize("references", [2, 4])
of_types = pytest.mark.parametrize("types", TYPES, ids=str)


def assert_matches_reference(case, of=(0, 3, 4, 5)):
    """Compare the output, and gradients with respect to the arguments ``of``, with those in float64."""
    coordinates = 1e-12 if case[0].dtype == torch.float64 else 2e-5
    of_inputs = max(TOLERANCE[case[4].dtype], coordinates)
    tolerances = {0: TOLERANCE[case[0].dtype], 3: coordinates, 4: of_inputs, 5: of_inputs}
    assert_matches(
        *(ms_deform_attn_fused, ms_deform_attn_fused_reference, case, tolerances[0]),
        *(tolerances[index] for index in of),
        of=of,
    )


@of_types
@of_points_and_boxes
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name, references, types, device, deterministic):
    assert_matches_reference(make_case(*CASES[name], references, *types, device))


@of_types
@of_points_and_boxes
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
    expected = ms_deform_attn_fused_reference(*exact(case))
    assert relative_error(ms_deform_attn_fused(*case), expected) < TOLERANCE[dtype]


@of_types
@of_points_and_boxes
@pytest.mark.parametrize("num_points", [[4, 0, 0], [8, 0, 1], [3, 6, 3], [8, 16, 8]], ids=str)
def test_references_that_need_no_gradient(num_points, references, types, device, deterministic):
    case = make_case(2, 73, 3, 32, num_points, THREE_LEVELS, references, *types, device)
    assert_matches_reference(case, of=(0, 4, 5))


@of_two_types
@pytest.mark.parametrize("of", [(0, 4, 5), (0, 3, 4, 5)], ids=["offsets", "references-and-offsets"])
def test_gradients_of_an_encoders_many_rows(of, dtype, device):
    """A block of the CUDA kernel owns rows of two heads, and more than it works out the softmax of at a time."""
    case = make_case(17, 268, 8, 32, [4, 4, 4], [(17, 15), (1, 7), (3, 2)], 2, dtype, device=device)
    assert_matches_reference(case, of)


@of_points_and_boxes
def test_twenty_levels(references, device):
    # On CUDA more than travel with a launch: the path of separate operators.
    case = make_case(1, 5, 2, 8, [1, 2] * 10, [(3, 4)] * 20, references, torch.float32, device=device)
    assert_matches_reference(case)


def rejection_case():
    names = ("value", "level_shapes", "level_starts", "reference_points", "offsets", "logits", "num_points")
    return dict(zip(names, make_case(2, 5, 2, 4, [3, 3], [(3, 2), (2, 2)], dtype=torch.float32), strict=True))


REJECTIONS = {
    "shapes-sum": (
        dict(level_shapes=torch.tensor([[3, 2], [1, 3]])),
        "sum of height . width over level_shapes must be S = 10, got 9",
    ),
    "points-count": (
        dict(num_points=[3, 3, 3]),
        "num_points must be a number for each of the 2 levels, got 3",
    ),
    "points-negative": (dict(num_points=[7, -1]), "num_points must be at least 0"),
    "points-sum": (
        dict(num_points=[3, 4]),
        r"offsets must be \[B, Q, G, K, 2\] = \[2, Q, 2, 7, 2\], got \[2, 5, 2, 6, 2\]",
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
}


REFUSED = changed_calls(ms_deform_attn_fused, rejection_case(), REJECTIONS.values())


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
    assert_close(out, composed, rtol=1e-4, atol=1e-5)


def _composed(case):
    _, shapes, _, references, offsets, logits, num_points = case
    level, P = len(num_points), num_points[0]
    size = shapes.flip(1).to(offsets)
    locations = references[:, :, None, :, None] + offsets.unflatten(3, (level, P)) / size[:, None]
    return locations, logits.softmax(-1).unflatten(3, (level, P))


@pytest.mark.parametrize("number", [np.int64(2), np.array([2, 2]), torch.tensor([2, 2]), (2, 2)], ids=str)
def test_numbers_of_points_may_be_of_numpy(number):
    shapes, references, zeros = [(3, 4), (2, 2)], torch.rand(1, 3, 1, 2), torch.zeros(1, 3, 2, 4, 2)
    arguments = torch.ones(1, 16, 2, 4), shapes, None, references, zeros, zeros[..., 0]
    assert_close(
        ms_deform_attn_fused(*arguments, number), ms_deform_attn_fused(*arguments, 2), equal_nan=True
    )
