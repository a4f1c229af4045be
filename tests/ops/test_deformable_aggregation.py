"""deformable_aggregation: by hand, and against the plain-torch definition."""

import math
from functools import partial

import pytest
import torch
from calls import (
    assert_near,
    changed_calls,
    exact,
    gradients,
    in_a_process,
    in_order,
    without_synchronisation,
)
from golden import golden, under
from torch.testing import assert_close

from tests.fuzz.aggregation import (
    SPOILED,
    aggregation_bounds,
    draw_aggregation,
    launches_of_aggregation,
    make_case,
    of_shapes,
)
from tests.fuzz.problem import Operator, Seeded, generator_of
from visdet.ops import (
    deformable_aggregation,
    deformable_aggregation_function,
    deformable_aggregation_reference,
    feature_maps_format,
)
from visdet.ops.explain import choose_only

# Largest |difference| / largest |value| against the float64 definition on the same (rounded) features.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


CASES = {
    "B2-Q13-P4-G2-C20": (2, 13, 4, 2, 20),
    "B1-Q5-P3-G1-C30": (1, 5, 3, 1, 30),
    "B3-Q9-P13-G8-C256": (3, 9, 13, 8, 256),
    "B2-Q3-P2-G71-C71": (2, 3, 2, 71, 71),
    "B1-Q2-P30-G5-C1025": (1, 2, 30, 5, 1025),
}


OPERATORS = (
    Operator(
        "deformable_aggregation",
        deformable_aggregation,
        draw_aggregation,
        deformable_aggregation_reference,
        aggregation_bounds,
        reads_beside=("features",),
        spoiled=SPOILED,
        of_size=(
            lambda n: of_shapes(features=(2, 18, 4), locations=(2, n, 3, 2, 2), weights=(2, n, 3, 2, 1, 2)),
        ),
        launches=launches_of_aggregation(),
    ),
)


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


@pytest.mark.parametrize("suffix", ["", "_border", "_per_camera_shapes"])
def test_golden_vectors(suffix):
    arrays = under(golden("modules"), f"deformable_aggregation{suffix}")
    names = ("feature", "spatial_shapes", "start_index", "locations", "weights")
    case = [arrays[f"input/{name}"] for name in names]
    output, grads = gradients(deformable_aggregation_function, case, arrays["input/grad_output"])
    names = ("output", "grad_feature", "grad_locations", "grad_weights")
    assert_near((output, *grads), [arrays[f"output/{name}"] for name in names], 1e-12)


SHAPES_groups = [
    [(6, 9), (3, 5)],
    [(7, 9), (4, 5)],
    [(6, 9), (3, 5)],
]  # three cameras, the second with a row more


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "channels, dtype", [(6, torch.float64), (12, torch.float32), (24, torch.bfloat16)], ids=str
)
def test_bad_channel_stays_in_its_group(channels, dtype, bad, device):
    features, shapes, starts, locations, weights = make_case(
        1, 5, 3, 3, 3 * channels, dtype=dtype, device=device
    )
    locations = locations * 0.4 + 0.3  # visible, every one
    case = features, shapes, starts, locations, weights
    expected, expected_grads = gradients(deformable_aggregation, case)
    features[:, :, 0] = bad
    output, grads = gradients(deformable_aggregation, case)
    assert not output[..., 0].isfinite().any() and torch.equal(output[..., 1:], expected[..., 1:])
    assert not grads[2][..., 0].isfinite().any() and torch.equal(
        grads[2][..., 1:], expected_grads[2][..., 1:]
    )


def run(case, grad_output, deterministic=False):
    """Return the output and the gradients of the operators themselves, which copy no argument beforehand."""
    ops = torch.ops.visdet
    output = ops.deformable_aggregation.default(*case)
    return output, *ops.deformable_aggregation_backward.default(grad_output, *case, deterministic)


PATHS = {
    "deformable_aggregation": ("packs", "single_values"),
    "deformable_aggregation_backward": ("packs", "single_values"),
}


@pytest.mark.cuda
@pytest.mark.parametrize(
    "op, path, dtype",
    [
        (op, path, dtype)
        for op, paths in PATHS.items()
        for path in paths
        for dtype in TOLERANCE
        if dtype != torch.float64 or path == "single_values"  # the only path of float64
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "G, C", [(4, 96), (16, 256), (5, 120)]
)  # three packs of 16 bits a group, two packs of float32 a lane, idle lanes
def test_every_path_gives_the_same(G, C, op, path, dtype):
    case = make_case(2, 7, 5, G, C, SHAPES_groups, dtype=dtype, device="cuda")
    grad_output = torch.randn(2, 7, C, generator=generator_of(1)).to(dtype).cuda()
    expected, grads = gradients(deformable_aggregation_reference, exact(case), grad_output.double())
    with choose_only(op, path):
        results = run(case, grad_output)
    wide = 1e-12 if dtype == torch.float64 else 2e-5
    assert_near(results, (expected, *grads), TOLERANCE[dtype], TOLERANCE[dtype], wide, wide)


@pytest.mark.cuda
def test_so_many_groups_and_levels_are_refused():
    G = 1 << 21
    features, zero = torch.zeros(1, device="cuda").expand(1, 4, G), torch.zeros(1, device="cuda")
    weights = zero.expand(1, 1, 1, 1, 1, G)
    with pytest.raises(RuntimeError, match=r"L \* G must be under 2.21 on CUDA, got 1 \* 2097152"):
        deformable_aggregation(features, [[(2, 2)]], [[0]], zero.expand(1, 1, 1, 1, 2), weights)


@pytest.mark.parametrize("sizes", [(0, 2), (3, 0), (0, 0)], ids=lambda sizes: f"V{sizes[0]}-L{sizes[1]}")
def test_no_cameras_or_no_levels(sizes, device):
    V, L = sizes
    case = (
        torch.ones(2, 6, 8, device=device),
        torch.ones(V, L, 2, dtype=torch.int64),
        torch.zeros(V, L, dtype=torch.int64),
        torch.full((2, 5, 3, V, 2), 0.5, device=device),
        torch.ones(2, 5, 3, V, L, 4, device=device),
    )
    output, grads = gradients(deformable_aggregation, case, torch.ones(2, 5, 8))
    assert output.shape == (2, 5, 8) and not output.any()
    assert all(
        grad.shape == case[i].shape and not grad.any() for i, grad in zip((0, 3, 4), grads, strict=True)
    )


def samples_on_a_map(Q, P, spread, C=8, size=(9, 9)):
    """Return a case on the GPU: one camera, one map, and Q * P samples within `spread` of its middle.

    No sample lies between two cells, where the gradient of its location jumps and float32 may take the other side.
    """
    features, shapes, starts, locations, weights = make_case(
        1, Q, P, 2, C, [[size]], dtype=torch.float32, device="cuda"
    )
    drawn = Seeded(2).uniform(*locations.shape)
    width_height = torch.tensor(size[::-1])
    pixels = (drawn * spread + (0.5 - spread / 2)) * width_height - 0.5
    pixels = pixels.floor() + pixels.frac().abs().clamp(0.01, 0.99)
    locations = ((pixels + 0.5) / width_height).to(locations)
    return features, shapes, starts, locations, weights


@pytest.mark.cuda
@pytest.mark.parametrize("spread", [0.01, 0.99], ids=["one-cell", "all-cells"])
def test_sum_of_samples_far_apart_is_deterministic(spread):
    # The samples of a cell have numbers up to 300 000: more than are sorted with a few bitmaps.
    case = samples_on_a_map(3000, 100, spread)
    grad_output = torch.randn(1, 3000, 8, generator=generator_of(1)).cuda()
    runs = [run(case, grad_output, deterministic=True) for _ in range(3)]
    for other in runs[1:]:
        assert_close(other, runs[0], rtol=0, atol=0)
    expected, grads = gradients(deformable_aggregation_reference, exact(case), grad_output.double())
    assert_near(runs[0], (expected, *grads), 1e-4)


@pytest.mark.cuda
def test_tables_on_a_gpu_for_features_on_the_cpu_are_refused():
    case = make_case(2, 5, 3, 2, 4, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="must be on the CPU or on the device of features"):
        torch.ops.visdet.deformable_aggregation.default(case[0], case[1].cuda(), case[2].cuda(), *case[3:])


STRAY_TABLES = """
import torch
import visdet.ops
from tests.fuzz.aggregation import make_case
case = make_case(2, 5, 3, 2, 8, dtype=torch.float32, device="cuda")
for shape, start in ((1, 2**63 - 1), (2**62, 0), (2**31, 2**31), (-1, 0), (0, 0), (3, -(2**63))):
    shapes, starts = torch.full_like(case[1], shape).cuda(), torch.full_like(case[2], start).cuda()
    output = torch.ops.visdet.deformable_aggregation.default(case[0], shapes, starts, *case[3:])
    torch.ops.visdet.deformable_aggregation_backward.default(
        torch.ones_like(output), case[0], shapes, starts, *case[3:], True
    )
    torch.cuda.synchronize()
    assert output.isnan().any(), (shape, start)
"""


@pytest.mark.cuda
def test_tables_on_the_device_with_any_numbers_lead_to_no_stray_access():
    in_a_process(STRAY_TABLES)


def rejection_case():
    names = ("features", "level_shapes", "level_starts", "locations", "weights")
    return dict(zip(names, make_case(2, 5, 3, 2, 4, dtype=torch.float32), strict=True))


REJECTIONS = {
    "shapes-zero": (
        dict(level_shapes=torch.zeros(3, 2, 2, dtype=torch.int64)),
        r"level_shapes\[0, 0\] must be a positive",
    ),
    "shapes-huge": (
        dict(level_shapes=torch.full((3, 2, 2), 2**40)),
        r"level_shapes\[0, 0\] must be a positive",
    ),
    "starts-shape": (
        dict(level_starts=torch.zeros(3, dtype=torch.int64)),
        r"level_starts must be \[V, L\] = \[3, 2\], got \[3\]",
    ),
    "starts-overlap": (
        dict(level_starts=torch.zeros(3, 2, dtype=torch.int64)),
        "level_starts must not let maps overlap",
    ),
    "starts-outside": (
        dict(level_starts=torch.full((3, 2), 500)),
        "camera 0, level 0 .35 rows from row 500. must lie",
    ),
    "starts-negative": (
        dict(level_starts=torch.full((3, 2), -1)),
        "camera 0, level 0 .35 rows from row -1. must lie",
    ),
    "weights-groups": (
        dict(weights=torch.zeros(2, 5, 3, 3, 2, 3)),
        "must divide the channels C = 4 of features, got G = 3",
    ),
    "weights-no-groups": (
        dict(weights=torch.zeros(2, 5, 3, 3, 2, 0)),
        "must divide the channels C = 4 of features, got G = 0",
    ),
    "shapes-text": (dict(level_shapes="abc"), "level_shapes must be an integer tensor or nested"),
    "shapes-fraction": (dict(level_shapes=[[(3.5, 2), (2, 2)]]), "level_shapes must be an integer"),
    "starts-fraction": (dict(level_starts=[[0.5, 6.5]]), "level_starts must be an integer"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_between_maps_have_zero_gradients(dtype, device):
    case = make_case(*CASES["B2-Q13-P4-G2-C20"], dtype=dtype, device=device)
    features, shapes, starts, locations, weights = case
    gap = features.new_full((2, 3, 20), math.nan)
    apart = torch.cat([gap, features, gap], 1), shapes, starts + 3, locations, weights
    output, grads = gradients(deformable_aggregation, case, torch.ones(2, 13, 20))
    output_apart, grads_apart = gradients(deformable_aggregation, apart, torch.ones(2, 13, 20))
    assert torch.equal(output_apart, output)
    assert_close(grads_apart[0][:, 3:-3], grads[0])
    assert (grads_apart[0][:, :3] == 0).all() and (grads_apart[0][:, -3:] == 0).all()


def test_feature_maps_format_and_back():
    maps = [torch.randn(2, 3, 4, H, W) for H, W in ((4, 6), (2, 3))]
    features, shapes, starts = feature_maps_format(maps)
    assert features.shape == (2, 3 * 30, 4)
    assert shapes.tolist() == [[[4, 6], [2, 3]]] * 3
    assert starts.tolist() == [[0, 24], [30, 54], [60, 84]]
    assert torch.equal(features[1, 30 + 24 + 4], maps[1][1, 1, :, 1, 1])  # camera 1, level 1, (y, x) = (1, 1)
    (back,) = feature_maps_format([features, shapes, starts], inverse=True)
    assert_close(back, maps, rtol=0, atol=0)


def test_feature_maps_format_of_cameras_of_two_sizes():
    groups = [
        [torch.randn(2, V, 4, H, W), torch.randn(2, V, 4, H // 2, W // 2)]
        for V, H, W in ((2, 4, 6), (1, 6, 8))
    ]
    flat = feature_maps_format(groups)
    assert flat[1].tolist() == [[[4, 6], [2, 3]]] * 2 + [[[6, 8], [3, 4]]]
    back = feature_maps_format(flat, inverse=True)
    assert_close(back, groups, rtol=0, atol=0)


MAPS, ONE_MAP = [torch.zeros(2, 3, 4, 4, 6), torch.zeros(2, 3, 4, 2, 3)], torch.zeros(2, 1, 4, 5, 5)
REFUSED = [
    *changed_calls(deformable_aggregation, rejection_case(), REJECTIONS.values()),
    (lambda: feature_maps_format([]), "must hold at least one map, got none"),
    (
        lambda: feature_maps_format([torch.zeros(2, 3, 4, 4, 6), torch.zeros(2, 1, 4, 2, 3)]),
        "Sizes of tensors must match",
    ),
    (
        lambda: feature_maps_format([torch.zeros(3, 4)]),
        r"each level must be \[B, V, C, H, W\], got \[3, 4\]",
    ),
    (lambda: feature_maps_format([[]]), r"each level must be \[B, V, C, H, W\], got none"),
    *(
        (partial(feature_maps_format, [MAPS, other]), rf"must have 2 levels \[2, V, 4, H, W\] as .*, {text}")
        for other, text in (
            ([ONE_MAP], r"got 1 like \[2, 1, 4, 5, 5\]"),
            ([ONE_MAP[:1], ONE_MAP[:1]], r"got 2 like \[1, 1, 4, 5, 5\]"),
            ([ONE_MAP[:, :, :3], ONE_MAP[:, :, :3]], r"got 2 like \[2, 1, 3, 5, 5\]"),
        )
    ),
]


def test_feature_maps_format_of_no_cameras():
    features, shapes, starts = feature_maps_format([torch.zeros(2, 0, 4, 4, 6), torch.zeros(2, 0, 4, 2, 3)])
    assert features.shape == (2, 0, 4) and shapes.shape == (0, 2, 2) and starts.shape == (0, 2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_many_pairs_on_few_texels(deterministic, device):
    # Every sample falls into one of four cells: hundreds of records a texel, 1200 pairs a query.
    case = list(make_case(1, 30, 400, 2, 16, [[(3, 3)]] * 3, device=device))
    case[3] = (Seeded().uniform(1, 30, 400, 3, 2) * 0.2 + 0.4).to(device)
    with in_order(deterministic):
        found = gradients(deformable_aggregation, case)
    assert_close(found, gradients(deformable_aggregation_reference, case))


def test_more_maps_than_travel_with_a_launch(device):
    case = make_case(1, 5, 2, 2, 8, [[(3, 4)] * 5] * 20, device=device)
    expected = gradients(deformable_aggregation_reference, case)
    assert_close(gradients(deformable_aggregation, case), expected)


@pytest.mark.cuda
def test_tables_on_the_device_that_leave_features_yield_nan():
    features, shapes, starts, locations, weights = make_case(
        2, 5, 3, 2, 4, dtype=torch.float32, device="cuda"
    )
    locations[:] = 0.4
    wrong = shapes.clone()
    wrong[1, 1] = torch.tensor([1 << 40, 1 << 40])
    case = (features, wrong.cuda(), starts.cuda(), locations, weights)
    output, grads = gradients(deformable_aggregation, case, torch.ones(2, 5, 4))
    assert output.isnan().all() and grads[0].isfinite().all()
    assert grads[2][:, :, :, 1, 1].isnan().all() and grads[2][:, :, :, [0, 2]].isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize(
    "sizes, message",
    [
        ((1 << 30, 1, 1, 1, 1), "features must have fewer than 2.30 rows S on CUDA, got 1073741824"),
        ((4, 1 << 16, 1 << 15, 1, 1), r"Q \* P \* V \* L must be under 2.30 on CUDA"),
        ((513, 1, 1, 513, 1), r"V \* L must be at most 512 on CUDA, got 513 \* 1"),
    ],
)
def test_limits_on_cuda(sizes, message):
    S, Q, P, V, L = sizes
    zero = torch.zeros(1, device="cuda")
    features, locations = zero.expand(1, S, 1), zero.expand(1, Q, P, V, 2)
    weights = zero.expand(1, Q, P, V, L, 1)
    tables = torch.ones(V, L, 2, dtype=torch.int64), torch.arange(V * L).view(V, L)
    with pytest.raises(RuntimeError, match="deformable_aggregation: " + message):
        deformable_aggregation(features, *tables, locations, weights)


@pytest.mark.cuda
def test_no_synchronisation():
    case = make_case(*CASES["B3-Q9-P13-G8-C256"], dtype=torch.float32, device="cuda")
    features, shapes, starts, locations, weights = case
    maps = [torch.randn(3, 3, 16, H, W, device="cuda") for H, W in ((4, 6), (2, 3))]
    with without_synchronisation():
        gradients(deformable_aggregation_function, case, torch.ones(3, 9, 256, device="cuda"))
        on_device = (
            features,
            shapes.cuda(non_blocking=True),
            starts.cuda(non_blocking=True),
            locations,
            weights,
        )
        gradients(deformable_aggregation_function, on_device, torch.ones(3, 9, 256, device="cuda"))
        feature_maps_format(feature_maps_format(maps), inverse=True)


@pytest.mark.cuda
def test_more_than_two_to_the_31_elements():
    # features have 2^31 + 2^20 elements in bfloat16 (4.3 GB); the last rows are sampled and get a gradient.
    C, H, W = 1024, 1024, 2050
    features = torch.zeros(1, H * W, C, dtype=torch.bfloat16, device="cuda")
    features[:, -1] = 3
    centre = torch.tensor([(W - 0.5) / W, (H - 0.5) / H], device="cuda").expand(1, 2, 1, 1, 2)
    weights = torch.ones(1, 2, 1, 1, 1, 8, device="cuda")
    out = deformable_aggregation(features.requires_grad_(), [[(H, W)]], [[0]], centre, weights)
    assert_close(out, torch.full_like(out, 3), rtol=1e-2, atol=0)
    (grad,) = torch.autograd.grad(out.sum(), features)
    assert_close(grad[0, -1], torch.full_like(grad[0, -1], 2), rtol=1e-2, atol=0)
    assert not grad[0, :-W].any()
