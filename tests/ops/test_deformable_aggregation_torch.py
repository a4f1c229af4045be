"""What deformable_aggregation refuses, and what torch does with it; the format of its features; its limits on CUDA."""

import math

import pytest
import torch
from aggregation_cases import CASES, DEVICES, make_case
from calls import gradients

from visdet.ops import (
    deformable_aggregation,
    deformable_aggregation_function,
    deformable_aggregation_fused,
    deformable_aggregation_reference,
    feature_maps_format,
    ms_deform_attn_fused,
)


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
        dict(level_shapes=torch.ones(3, 2, dtype=torch.int64)),
        r"level_shapes must be \[V, L, 2\] \(height, width\), got",
    ),
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
    first, maps = [torch.zeros(2, 3, 4, 4, 6), torch.zeros(2, 3, 4, 2, 3)], torch.zeros(2, 1, 4, 5, 5)
    for other, text in [
        ([maps], r"got 1 like \[2, 1, 4, 5, 5\]"),
        ([maps[:1], maps[:1]], r"got 2 like \[1, 1, 4, 5, 5\]"),
        ([maps[:, :, :3], maps[:, :, :3]], r"got 2 like \[2, 1, 3, 5, 5\]"),
    ]:
        with pytest.raises(ValueError, match=rf"must have 2 levels \[2, V, 4, H, W\] as .*, {text}"):
            feature_maps_format([first, other])


def test_feature_maps_format_of_no_cameras():
    features, shapes, starts = feature_maps_format([torch.zeros(2, 0, 4, 4, 6), torch.zeros(2, 0, 4, 2, 3)])
    assert features.shape == (2, 0, 4) and shapes.shape == (0, 2, 2) and starts.shape == (0, 2)


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
