"""deformable_aggregation: by hand, against the plain-torch definition and golden vectors, and its promises."""

import math

import pytest
import torch
from golden import golden, under
from torch.library import opcheck

from visdet.ops import (
    deformable_aggregation,
    deformable_aggregation_function,
    deformable_aggregation_fused,
    deformable_aggregation_reference,
    feature_maps_format,
    ms_deform_attn_fused,
)

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]

# Largest |difference| / largest |value| against the float64 definition on the same (rounded) features.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}

SHAPES = [[(7, 5), (3, 4)], [(6, 9), (2, 2)], [(5, 5), (1, 3)]]  # three cameras, two levels


def make_case(B, Q, P, G, C, shapes=SHAPES, dtype=torch.float64, device="cpu", seed=0):
    """Return features, shapes, starts, locations (a part outside), weights; off texel centres and off 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    level_shapes = torch.tensor(shapes, dtype=torch.int64)
    V, L = level_shapes.shape[:2]
    areas = level_shapes.prod(-1).flatten()
    starts = (areas.cumsum(0) - areas).view(V, L)
    coordinate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    features = torch.randn(B, int(areas.sum()), C, generator=generator, dtype=torch.float64).to(dtype)
    locations = torch.rand(B, Q, P, V, 2, generator=generator, dtype=torch.float64) * 1.6 - 0.3
    weights = torch.randn(B, Q, P, V, L, G, generator=generator, dtype=torch.float64)
    return (
        features.to(device),
        level_shapes,
        starts,
        locations.to(coordinate_dtype).to(device),
        weights.to(coordinate_dtype).to(device),
    )


CASES = {
    "B2-Q13-P4-G2-C20": (2, 13, 4, 2, 20),
    "B1-Q5-P3-G1-C30": (1, 5, 3, 1, 30),
    "B3-Q9-P13-G8-C256": (3, 9, 13, 8, 256),
    "B2-Q3-P2-G71-C71": (2, 3, 2, 71, 71),
    "B1-Q2-P30-G5-C1025": (1, 2, 30, 5, 1025),
}


def gradients(function, case, grad_output):
    features, shapes, starts, locations, weights = case
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (features, locations, weights)]
    output = function(leaves[0], shapes, starts, leaves[1], leaves[2])
    return output, torch.autograd.grad(output, leaves, grad_output.to(output))


def relative_error(actual, expected):
    scale = expected.abs().max().clamp(min=1e-30)
    return ((actual.double().cpu() - expected.double().cpu()).abs().max() / scale.cpu()).item()


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "sizes", [(0, 5, 3, 2, 4), (2, 0, 3, 2, 4), (2, 5, 0, 2, 4), (2, 5, 3, 2, 0)], ids=str
)
def test_empty_sizes(sizes, device):
    case = make_case(*sizes, dtype=torch.float32, device=device)
    output, grads = gradients(deformable_aggregation, case, torch.ones(sizes[0], sizes[1], sizes[4]))
    assert output.shape == (sizes[0], sizes[1], sizes[4]) and (output == 0).all()
    assert [grad.shape for grad in grads] == [case[0].shape, case[3].shape, case[4].shape]
    assert all((grad == 0).all() for grad in grads)


def test_non_contiguous_inputs():
    features, shapes, starts, locations, weights = make_case(*CASES["B3-Q9-P13-G8-C256"], dtype=torch.float32)
    strided = (
        features.transpose(1, 2).contiguous().transpose(1, 2),
        shapes.transpose(0, 1).contiguous().transpose(0, 1),
        starts.t().contiguous().t(),
        locations.transpose(0, 3).contiguous().transpose(0, 3),
        weights.transpose(0, 5).contiguous().transpose(0, 5),
    )
    assert not any(tensor.is_contiguous() for tensor in strided)
    grad_output = torch.ones(1).expand(3, 9, 256)
    output, grads = gradients(deformable_aggregation, strided, grad_output)
    expected, expected_grads = gradients(
        deformable_aggregation, (features, shapes, starts, locations, weights), grad_output.contiguous()
    )
    assert torch.equal(output, expected)
    assert all(torch.equal(*pair) for pair in zip(grads, expected_grads, strict=True))


def rejection_case():
    names = ("features", "level_shapes", "level_starts", "locations", "weights")
    return dict(zip(names, make_case(2, 5, 3, 2, 4, dtype=torch.float32), strict=True))


REJECTIONS = {
    "features-4d": (
        dict(features=torch.zeros(2, 1, 112, 4)),
        r"features must be \[B, S, C\], got \[2, 1, 112, 4\]",
    ),
    "features-int": (
        dict(features=torch.zeros(2, 112, 4, dtype=torch.int32)),
        "features must be float64, float32",
    ),
    "shapes-2d": (
        dict(level_shapes=torch.ones(3, 2)),
        r"level_shapes must be \[V, L, 2\] \(height, width\), got",
    ),
    "shapes-zero": (dict(level_shapes=torch.zeros(3, 2, 2)), r"level_shapes\[0, 0\] must be a positive"),
    "shapes-huge": (
        dict(level_shapes=torch.full((3, 2, 2), 2**40)),
        r"level_shapes\[0, 0\] must be a positive",
    ),
    "starts-shape": (
        dict(level_starts=torch.zeros(3)),
        r"level_starts must be \[V, L\] = \[3, 2\], got \[3\]",
    ),
    "starts-overlap": (dict(level_starts=torch.zeros(3, 2)), "level_starts must not let maps overlap"),
    "starts-outside": (
        dict(level_starts=torch.full((3, 2), 500)),
        "camera 0, level 0 .35 rows from row 500. must lie",
    ),
    "starts-negative": (
        dict(level_starts=torch.full((3, 2), -1)),
        "camera 0, level 0 .35 rows from row -1. must lie",
    ),
    "locations-cameras": (
        dict(locations=torch.zeros(2, 5, 3, 4, 2)),
        r"locations must be \[B, Q, P, V, 2\] = \[2, Q, P, 3, 2\], got \[2, 5, 3, 4, 2\]",
    ),
    "weights-levels": (
        dict(weights=torch.zeros(2, 5, 3, 3, 1, 2)),
        r"weights must be \[B, Q, P, V, L, G\] = \[2, 5, 3, 3, 2, G\], got \[2, 5, 3, 3, 1, 2\]",
    ),
    "weights-groups": (
        dict(weights=torch.zeros(2, 5, 3, 3, 2, 3)),
        "must divide the channels C = 4 of features, got G = 3",
    ),
    "weights-no-groups": (
        dict(weights=torch.zeros(2, 5, 3, 3, 2, 0)),
        "must divide the channels C = 4 of features, got G = 0",
    ),
    "weights-device": (
        dict(weights=torch.zeros(2, 5, 3, 3, 2, 2, device="meta")),
        "weights must be on features' device cpu, got meta",
    ),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejects(name):
    change, message = REJECTIONS[name]
    with pytest.raises(RuntimeError, match=message) as caught:
        deformable_aggregation(**(rejection_case() | change))
    assert str(caught.value).startswith("deformable_aggregation: ")


def test_rejects_levels_that_are_no_numbers():
    with pytest.raises(
        TypeError, match="level_shapes must be an integer tensor or nested sequences of integers"
    ):
        deformable_aggregation(**(rejection_case() | dict(level_shapes="abc")))


def test_autocast_keeps_every_type():
    case = make_case(*CASES["B2-Q13-P4-G2-C20"], dtype=torch.float32)
    expected = deformable_aggregation(*case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(deformable_aggregation(*case), expected)
        assert deformable_aggregation(case[0].bfloat16(), *case[1:]).dtype == torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, device):
    case = make_case(*CASES["B2-Q13-P4-G2-C20"], dtype=dtype, device=device)
    features, shapes, starts, locations, weights = case
    leaves = (features.requires_grad_(), shapes, starts, locations.requires_grad_(), weights.requires_grad_())
    opcheck(torch.ops.visdet.deformable_aggregation.default, leaves)


def test_compiles_without_graph_breaks_for_any_batch():
    compiled = torch.compile(deformable_aggregation, fullgraph=True, dynamic=True, backend="aot_eager")
    for B, Q in ((2, 13), (3, 7)):
        case = make_case(B, Q, 4, 2, 20, dtype=torch.float32)
        output, grads = gradients(compiled, case, torch.ones(B, Q, 20))
        expected, expected_grads = gradients(deformable_aggregation, case, torch.ones(B, Q, 20))
        assert torch.equal(output, expected)
        assert all(torch.equal(*pair) for pair in zip(grads, expected_grads, strict=True))


def test_exports():
    class Module(torch.nn.Module):
        def forward(self, features, locations, weights):
            return deformable_aggregation(features, shapes.tolist(), starts.tolist(), locations, weights)

    features, shapes, starts, locations, weights = make_case(*CASES["B2-Q13-P4-G2-C20"], dtype=torch.float32)
    program = torch.export.export(Module(), (features, locations, weights))
    assert torch.equal(
        program.module()(features, locations, weights),
        deformable_aggregation(features, shapes, starts, locations, weights),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_between_maps_have_zero_gradients(dtype, device):
    case = make_case(*CASES["B2-Q13-P4-G2-C20"], dtype=dtype, device=device)
    features, shapes, starts, locations, weights = case
    gap = features.new_full((2, 3, 20), math.nan)
    apart = torch.cat([gap, features, gap], 1), shapes, starts + 3, locations, weights
    output, grads = gradients(deformable_aggregation, case, torch.ones(2, 13, 20))
    output_apart, grads_apart = gradients(deformable_aggregation, apart, torch.ones(2, 13, 20))
    assert torch.equal(output_apart, output)
    torch.testing.assert_close(grads_apart[0][:, 3:-3], grads[0])
    assert (grads_apart[0][:, :3] == 0).all() and (grads_apart[0][:, -3:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_result_does_not_depend_on_the_number_of_threads(dtype):
    case = make_case(*CASES["B3-Q9-P13-G8-C256"], dtype=dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 7):
            torch.set_num_threads(number)
            output, grads = gradients(deformable_aggregation, case, torch.ones(3, 9, 256))
            results.append((output, *grads))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


def test_feature_maps_format_and_back():
    maps = [torch.randn(2, 3, 4, H, W) for H, W in ((4, 6), (2, 3))]
    features, shapes, starts = feature_maps_format(maps)
    assert features.shape == (2, 3 * 30, 4)
    assert shapes.tolist() == [[[4, 6], [2, 3]]] * 3
    assert starts.tolist() == [[0, 24], [30, 54], [60, 84]]
    assert torch.equal(features[1, 30 + 24 + 4], maps[1][1, 1, :, 1, 1])  # camera 1, level 1, (y, x) = (1, 1)
    (back,) = feature_maps_format([features, shapes, starts], inverse=True)
    assert all(torch.equal(*pair) for pair in zip(back, maps, strict=True))


def test_feature_maps_format_of_cameras_of_two_sizes():
    groups = [
        [torch.randn(2, V, 4, H, W), torch.randn(2, V, 4, H // 2, W // 2)]
        for V, H, W in ((2, 4, 6), (1, 6, 8))
    ]
    flat = feature_maps_format(groups)
    assert flat[1].tolist() == [[[4, 6], [2, 3]]] * 2 + [[[6, 8], [3, 4]]]
    back = feature_maps_format(flat, inverse=True)
    for maps, wanted in zip(back, groups, strict=True):
        assert all(torch.equal(*pair) for pair in zip(maps, wanted, strict=True))


def test_feature_maps_format_rejects():
    with pytest.raises(ValueError, match="must hold at least one map, got none"):
        feature_maps_format([])
    with pytest.raises(
        ValueError, match=r"each level must be \[B, V, C, H, W\] = \[2, 3, 4, H, W\], got \[2, 1, 4, 2, 3\]"
    ):
        feature_maps_format([torch.zeros(2, 3, 4, 4, 6), torch.zeros(2, 1, 4, 2, 3)])
    with pytest.raises(ValueError, match=r"each level must be \[B, V, C, H, W\], got \[3, 4\]"):
        feature_maps_format([torch.zeros(3, 4)])
    with pytest.raises(ValueError, match=r"each level must be \[B, V, C, H, W\], got none"):
        feature_maps_format([[]])


def test_errors_of_level_tables_name_the_operator_that_was_called():
    key_points, logits = torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 1, 1, 1, 1)
    with pytest.raises(TypeError, match=r"^deformable_aggregation_fused: level_shapes must be .* got 'abc'"):
        deformable_aggregation_fused(
            torch.zeros(1, 4, 2), "abc", [[0]], key_points, torch.zeros(1, 1, 4, 4), None, logits
        )
    offsets, logits = torch.zeros(1, 1, 1, 1, 2), torch.zeros(1, 1, 1, 1)
    with pytest.raises(TypeError, match=r"^ms_deform_attn_fused: level_starts must be .* got 'abc'"):
        ms_deform_attn_fused(
            torch.zeros(1, 4, 1, 2), [(2, 2)], "abc", torch.zeros(1, 1, 1, 2), offsets, logits, 1
        )


@pytest.mark.parametrize("device", DEVICES)
def test_features_at_an_odd_address(device):
    # A slice that begins one element into its storage cannot be read 16 bytes at a time.
    case = make_case(*CASES["B3-Q9-P13-G8-C256"], dtype=torch.float32, device=device)
    shifted = torch.empty(case[0].numel() + 1, device=device)[1:].view_as(case[0]).copy_(case[0])
    output, grads = gradients(deformable_aggregation, (shifted, *case[1:]), torch.ones(3, 9, 256))
    expected, expected_grads = gradients(deformable_aggregation, case, torch.ones(3, 9, 256))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_many_pairs_on_few_texels(deterministic, device):
    # Every sample falls into one of four cells: hundreds of records a texel, 1200 pairs a query.
    generator = torch.Generator().manual_seed(0)
    case = list(make_case(1, 30, 400, 2, 16, [[(3, 3)]] * 3, device=device))
    case[3] = (torch.rand(1, 30, 400, 3, 2, generator=generator, dtype=torch.float64) * 0.2 + 0.4).to(device)
    grad_output = torch.randn(1, 30, 16, generator=generator, dtype=torch.float64)
    expected, expected_grads = gradients(deformable_aggregation_reference, case, grad_output)
    torch.use_deterministic_algorithms(deterministic)
    try:
        output, grads = gradients(deformable_aggregation, case, grad_output)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_on_request(dtype, device):
    case = make_case(2, 200, 30, 8, 64, dtype=dtype, device=device)
    grad_output = torch.randn(2, 200, 64)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [gradients(deformable_aggregation, case, grad_output) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for output, grads in runs[1:]:
        assert torch.equal(output, runs[0][0])
        assert all(torch.equal(*pair) for pair in zip(grads, runs[0][1], strict=True))


def test_saves_the_inputs_and_nothing_else():
    features, shapes, starts, locations, weights = make_case(*CASES["B2-Q13-P4-G2-C20"], dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        deformable_aggregation(
            features.requires_grad_(), shapes, starts, locations.requires_grad_(), weights.requires_grad_()
        )
    inputs = {tensor.data_ptr() for tensor in (features, shapes, starts, locations, weights)}
    assert {tensor.data_ptr() for tensor in saved} == inputs


@pytest.mark.parametrize("device", DEVICES)
def test_tables_as_lists_and_on_the_device(device):
    case = make_case(*CASES["B3-Q9-P13-G8-C256"], dtype=torch.float32, device=device)
    shapes, starts = case[1:3]
    expected, expected_grads = gradients(deformable_aggregation, case, torch.ones(3, 9, 256))
    for tables in ((shapes.tolist(), starts.tolist()), (shapes.to(device), starts.to(device).int())):
        output, grads = gradients(
            lambda f, h, s, x, w, tables=tables: deformable_aggregation(f, *tables, x, w),
            case,
            torch.ones(3, 9, 256),
        )
        assert torch.equal(output, expected)
        torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize("device", DEVICES)
def test_more_maps_than_travel_with_a_launch(device):
    case = make_case(1, 5, 2, 2, 8, [[(3, 4)] * 5] * 20, device=device)
    output, grads = gradients(deformable_aggregation, case, torch.ones(1, 5, 8))
    expected, expected_grads = gradients(deformable_aggregation_reference, case, torch.ones(1, 5, 8))
    torch.testing.assert_close((output, *grads), (expected, *expected_grads))


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
    features = torch.zeros(1, device="cuda").expand(1, S, 1)
    locations = torch.zeros(1, device="cuda").expand(1, Q, P, V, 2)
    weights = torch.zeros(1, device="cuda").expand(1, Q, P, V, L, 1)
    tables = torch.ones(V, L, 2, dtype=torch.int64), torch.arange(V * L).view(V, L)
    with pytest.raises(RuntimeError, match="deformable_aggregation: " + message):
        deformable_aggregation(features, *tables, locations, weights)


@pytest.mark.cuda
def test_current_stream_and_graph_capture():
    features, shapes, starts, locations, weights = make_case(
        *CASES["B3-Q9-P13-G8-C256"], dtype=torch.float32, device="cuda"
    )
    expected = deformable_aggregation(features, shapes, starts, locations, weights)
    grad_output = torch.ones_like(expected)
    leaf = features.clone().requires_grad_()

    def step():
        output = deformable_aggregation(leaf, shapes, starts, locations, weights)
        return output, torch.autograd.grad(output, leaf, grad_output)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, grad = step()
    with torch.no_grad():
        leaf.mul_(2)
    graph.replay()
    torch.testing.assert_close(output, expected * 2)
    assert grad.isfinite().all()


@pytest.mark.cuda
def test_no_synchronisation():
    case = make_case(*CASES["B3-Q9-P13-G8-C256"], dtype=torch.float32, device="cuda")
    features, shapes, starts, locations, weights = case
    maps = [torch.randn(3, 3, 16, H, W, device="cuda") for H, W in ((4, 6), (2, 3))]
    torch.cuda.set_sync_debug_mode("error")
    try:
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
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_more_than_two_to_the_31_elements():
    # features have 2^31 + 2^20 elements in bfloat16 (4.3 GB); the last rows are sampled and get a gradient.
    C, H, W = 1024, 1024, 2050
    features = torch.zeros(1, H * W, C, dtype=torch.bfloat16, device="cuda")
    features[:, -1] = 3
    centre = torch.tensor([(W - 0.5) / W, (H - 0.5) / H], device="cuda").expand(1, 2, 1, 1, 2)
    weights = torch.ones(1, 2, 1, 1, 1, 8, device="cuda")
    out = deformable_aggregation(features.requires_grad_(), [[(H, W)]], [[0]], centre, weights)
    torch.testing.assert_close(out, torch.full_like(out, 3), rtol=1e-2, atol=0)
    (grad,) = torch.autograd.grad(out.sum(), features)
    torch.testing.assert_close(grad[0, -1], torch.full_like(grad[0, -1], 2), rtol=1e-2, atol=0)
    assert not grad[0, :-W].any()
