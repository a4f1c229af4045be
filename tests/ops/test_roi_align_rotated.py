"""roi_align_rotated, riroi_align_rotated, rotated_feature_align and active_rotated_filter beside slow loops."""

import math

import pytest
import torch

from visdet.ops import (
    RiRoIAlignRotated,
    RoIAlignRotated,
    active_rotated_filter,
    riroi_align_rotated,
    roi_align,
    roi_align_rotated,
    rotated_feature_align,
)

ROIS = [
    [0, 4.2, 3.1, 6.3, 2.2, 0.7],
    [1, 2.0, 6.5, 3.0, 5.5, -2.4],
    [1, 9, 1, 8, 8, 11.0],
    [0, 3, 3, 0, 2, 1.0],
]


def maps(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def rois(dtype=torch.float64):
    return torch.tensor(ROIS, dtype=dtype)


def sample(plane, x, y):
    H, W = plane.shape
    if not (-1 <= x <= W and -1 <= y <= H):
        return 0.0
    x, y = min(max(x, 0), W - 1), min(max(y, 0), H - 1)
    left, top = min(int(x), max(W - 2, 0)), min(int(y), max(H - 2, 0))
    right, bottom, fx, fy = min(left + 1, W - 1), min(top + 1, H - 1), x - left, y - top
    above = (1 - fx) * plane[top, left] + fx * plane[top, right]
    below = (1 - fx) * plane[bottom, left] + fx * plane[bottom, right]
    return (1 - fy) * above + fy * below


def by_loops(x, rois, size, scale, ratio, aligned, clockwise):
    (PH, PW), out = size, torch.zeros(len(rois), x.shape[1], *size, dtype=x.dtype)
    for n, (b, cx, cy, w, h, angle) in enumerate(rois.tolist()):
        shift, angle = (0.5 if aligned else 0.0), (angle if clockwise else -angle)
        cx, cy, w, h = cx * scale - shift, cy * scale - shift, w * scale, h * scale
        if not aligned:
            w, h = max(w, 1), max(h, 1)
        down, across = (ratio, ratio) if ratio > 0 else (math.ceil(h / PH), math.ceil(w / PW))
        for c in range(x.shape[1]):
            for p in range(PH):
                for q in range(PW):
                    values = []
                    for i in range(down):
                        for j in range(across):
                            v = -h / 2 + (p + (i + 0.5) / down) * h / PH
                            u = -w / 2 + (q + (j + 0.5) / across) * w / PW
                            values.append(
                                sample(
                                    x[int(b), c],
                                    cx + u * math.cos(angle) - v * math.sin(angle),
                                    cy + u * math.sin(angle) + v * math.cos(angle),
                                )
                            )
                    if values:
                        out[n, c, p, q] = sum(values) / len(values)
    return out


@pytest.mark.parametrize("clockwise", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align_rotated_is_its_definition(ratio, aligned, clockwise):
    x, settings = maps(2, 2, 7, 9), ((2, 3), 0.8, ratio, aligned, clockwise)
    expected = by_loops(x, rois(), *settings)
    assert expected[:3].flatten(1).any(1).all()
    torch.testing.assert_close(roi_align_rotated(x, rois(), *settings), expected)
    torch.testing.assert_close(RoIAlignRotated(*settings)(x, rois()), expected)
    assert torch.autograd.gradcheck(
        lambda x: roi_align_rotated(x, rois(), *settings), x.requires_grad_(), fast_mode=True
    )


def test_without_an_angle_it_is_roi_align():
    x = maps(2, 3, 7, 9)
    boxes = torch.tensor([[1, 4.0, 3, 5, 4, 0], [0, 2, 2, 7, 3, 0]]).double()
    corners = torch.cat(
        [boxes[:, :1], boxes[:, 1:3] - boxes[:, 3:5] / 2, boxes[:, 1:3] + boxes[:, 3:5] / 2], 1
    )
    torch.testing.assert_close(roi_align_rotated(x, boxes, 2, 1.0), roi_align(x, corners, 2, 1.0))
    boxes[:, 5] = math.pi / 2  # a quarter turn, against the clock: up is to the left
    boxes[:, 3:5] = boxes[:, 3:5].flip(1)
    turned = roi_align_rotated(x, boxes, 2, 1.0)
    torch.testing.assert_close(turned, roi_align(x, corners, 2, 1.0).rot90(-1, (2, 3)))


@pytest.mark.parametrize("clockwise", [False, True])
def test_riroi_align_rotated_turns_orientations(clockwise):
    G, x = 4, maps(2, 8, 7, 9)
    settings = (2, 0.8, 2, G, clockwise)
    pooled = by_loops(x, rois(), (2, 2), 0.8, 2, False, clockwise).unflatten(1, (2, G))
    expected = torch.zeros_like(pooled)
    for n, angle in enumerate(rois()[:, 5].tolist()):
        turn = angle * G / (2 * math.pi)
        share = turn - math.floor(turn)
        for o in range(G):
            first = (o - math.floor(turn)) % G
            expected[n, :, o] = (1 - share) * pooled[n, :, first] + share * pooled[n, :, (first + 1) % G]
    expected = expected.flatten(1, 2)
    torch.testing.assert_close(riroi_align_rotated(x, rois(), *settings), expected)
    torch.testing.assert_close(RiRoIAlignRotated(*settings)(x, rois()), expected)
    assert torch.autograd.gradcheck(
        lambda x: riroi_align_rotated(x, rois(), *settings), x.requires_grad_(), fast_mode=True
    )


@pytest.mark.parametrize("points", [1, 5])
def test_rotated_feature_align_is_its_definition(points):
    x = maps(2, 2, 4, 5)
    boxes = maps(2, 4, 5, 5) * 8 + 10
    boxes[0, 0, 0], boxes[1, 2, 3] = math.nan, 1e30
    expected = x.clone()
    for b in range(2):
        for i in range(4):
            for j in range(5):
                y, left, w, h, angle = boxes[b, i, j].tolist()
                for u, v in ((0, 0), (0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5), (0.5, -0.5))[:points]:
                    px = (
                        (left + u * w * math.cos(angle) - v * h * math.sin(angle)) / 4 if y == y else math.nan
                    )
                    py = (y + u * w * math.sin(angle) + v * h * math.cos(angle)) / 4
                    for c in range(2):
                        expected[b, c, i, j] += sample(x[b, c], px, py)
    torch.testing.assert_close(rotated_feature_align(x, boxes, 1 / 4, points), expected)
    assert torch.autograd.gradcheck(
        lambda x: rotated_feature_align(x, boxes, 1 / 4, points), x.requires_grad_()
    )


def test_active_rotated_filter_is_its_definition():
    generator = torch.Generator().manual_seed(1)
    weight = maps(3, 2, 2, 3, 3)
    indices = torch.stack([torch.randperm(18, generator=generator) + 1 for _ in range(4)], 1).view(2, 3, 3, 4)
    expected = torch.zeros(3, 4, 2, 18, dtype=torch.float64)
    for k in range(4):
        for place, target in enumerate(indices.view(18, 4)[:, k].tolist()):
            expected[:, k, :, target - 1] = weight.flatten(2)[:, :, place]
    found = active_rotated_filter(weight, indices.int())
    assert torch.equal(found, expected.view(12, 4, 3, 3))
    assert torch.autograd.gradcheck(
        lambda w: active_rotated_filter(w, indices), weight.requires_grad_(), fast_mode=True
    )


def test_regions_that_count_for_nothing_and_empties():
    x = maps(2, 8, 7, 9).requires_grad_()
    bad = rois()[[0] * 6].clone()
    bad[0, 0], bad[1, 0], bad[2, 0] = -1, 2, 0.5
    bad[3, 1], bad[4, 5], bad[5, 5] = math.nan, math.nan, math.inf
    for out in (roi_align_rotated(x, bad, 2, 1.0), riroi_align_rotated(x, bad, 2, 1.0)):
        assert not out.any() and not torch.autograd.grad(out.sum(), x)[0].any()
    huge = rois()[[0] * 3].clone()
    huge[0, 3], huge[1, 1:5], huge[2, 1:3] = 1e30, math.inf, -1e9
    assert roi_align_rotated(x, huge, 2, 1.0).isfinite().all()
    for function in (roi_align_rotated, riroi_align_rotated):
        assert function(x, rois()[:0], 2, 1.0).shape == (0, 8, 2, 2)
        assert function(x[:, :, :0], rois(), 2, 1.0).shape == (4, 8, 2, 2)
    assert rotated_feature_align(x[:0], maps(0, 7, 9, 5)).shape == (0, 8, 7, 9)
    assert active_rotated_filter(maps(0, 2, 1, 1, 1), torch.ones(1, 1, 1, 3)).shape == (0, 2, 1, 1)
    assert active_rotated_filter(maps(2, 2, 1, 1, 1), torch.ones(1, 1, 1, 0)).shape == (0, 2, 1, 1)
    assert active_rotated_filter(maps(2, 2, 0, 1, 1), torch.ones(0, 1, 1, 3)).shape == (6, 0, 1, 1)


def test_a_point_outside_the_map_reads_no_pixel():
    x = torch.ones(1, 1, 3, 3)
    x[0, 0, 0, 0] = math.nan
    boxes = torch.full((1, 3, 3, 5), 99.0)
    assert rotated_feature_align(x, boxes, 1.0, 5).isnan().sum() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_rotated_filters_are_rounded_once(dtype):
    filters = torch.ones(1, 1, 1, 1, 1, dtype=dtype, requires_grad=True)
    rotated = active_rotated_filter(filters, torch.ones(1, 1, 1, 9).int())
    epsilon = torch.finfo(dtype).eps
    grads = torch.tensor([1.0] + [epsilon / 4] * 8, dtype=dtype)
    (found,) = torch.autograd.grad(rotated.flatten(), filters, grads)
    assert found.item() == 1 + 2 * epsilon


X = torch.zeros(2, 8, 4, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: roi_align_rotated(X, X[0, 0], 2, 1.0),
            r"roi_align_rotated: rois must be \[N, 6\] .*got \[4, 5\]",
        ),
        (lambda: roi_align_rotated(X[0], rois(), 2, 1.0), r"input must be \[B, C, H, W\], got \[8, 4, 5\]"),
        (lambda: roi_align_rotated(X, rois(), 2, 0.0), "spatial_scale must be positive and finite, got 0.0"),
        (lambda: roi_align_rotated(X, rois(), 0, 1.0), r"output_size must be positive, got \(0, 0\)"),
        (
            lambda: riroi_align_rotated(X[0], rois(), 2, 1.0),
            r"riroi_align_rotated: features must be \[B, C, H, W\]",
        ),
        (lambda: riroi_align_rotated(X, rois(), 0, 1.0), "riroi_align_rotated: out_size must be positive"),
        (
            lambda: rotated_feature_align(X.int(), X.new_zeros(2, 4, 5, 5)),
            "rotated_feature_align: features must be of a floating-point type",
        ),
        (
            lambda: active_rotated_filter(X[..., None].int(), X.new_ones(4, 5, 1, 2)),
            "active_rotated_filter: input must be of a floating-point type",
        ),
        (lambda: riroi_align_rotated(X, rois(), 2, 1.0, 0, 3), "num_orientations must be .*got 3 for 8"),
        (lambda: rotated_feature_align(X[0], X), r"features must be \[B, C, H, W\], got \[8, 4, 5\]"),
        (lambda: rotated_feature_align(X, X), r"best_rbboxes must be \[2, 4, 5, 5\], got \[2, 8, 4, 5\]"),
        (lambda: rotated_feature_align(X, X.new_zeros(2, 4, 5, 5), 1.0, 4), "points must be 1 or 5, got 4"),
        (lambda: active_rotated_filter(X, X), r"input must be \[M, C, G, K, K\], got \[2, 8, 4, 5\]"),
        (
            lambda: active_rotated_filter(X[..., None], X),
            r"indices must be \[4, 5, 1, R\], got \[2, 8, 4, 5\]",
        ),
    ],
)
def test_rejections(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("ratio", [0, 2])
def test_compilation_and_export(ratio):
    layer = RoIAlignRotated(2, 0.8, ratio)
    x = maps(2, 3, 7, 9)
    program = torch.export.export(layer, (x, rois()))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for function in (program.module(), compiled):
        torch.testing.assert_close(function(x, rois()), layer(x, rois()))
