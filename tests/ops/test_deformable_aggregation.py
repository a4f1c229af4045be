"""deformable_aggregation: by hand, against the plain-torch definition and golden vectors, and its promises."""

import math

import pytest
import torch
from golden import golden, under
from torch.library import opcheck

from visdet.ops import (
    deformable_aggregation,
    deformable_aggregation_function,
    deformable_aggregation_reference,
    feature_maps_format,
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


def test_gradcheck():
    features, shapes, starts, locations, weights = make_case(2, 3, 2, 2, 6)
    leaves = [tensor.requires_grad_() for tensor in (features, locations, weights)]
    assert torch.autograd.gradcheck(lambda f, x, w: deformable_aggregation(f, shapes, starts, x, w), leaves)


@pytest.mark.parametrize(
    "sizes", [(0, 5, 3, 2, 4), (2, 0, 3, 2, 4), (2, 5, 0, 2, 4), (2, 5, 3, 2, 0)], ids=str
)
def test_empty_sizes(sizes):
    case = make_case(*sizes, dtype=torch.float32)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    features, shapes, starts, locations, weights = make_case(*CASES["B2-Q13-P4-G2-C20"], dtype=dtype)
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
