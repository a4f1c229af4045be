"""Convex hulls of point sets, their overlaps and smallest boxes, points in polygons, chamfer distances, and the
differentiable overlap of rotated boxes, beside slow computations in plain Python."""

import math

import pytest
import torch

from tests.fuzz.polygons import area, cross, hull, points_of, shared
from visdet.ops import (
    _library,
    box_iou_rotated,
    chamfer_distance,
    convex_giou,
    convex_iou,
    diff_iou_rotated_2d,
    diff_iou_rotated_3d,
    min_area_polygons,
    points_in_polygons,
)
from visdet.ops.mmcv import point_sets as in_torch
from visdet.ops.mmcv.diff_iou_rotated import sorted_vertices

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]
needs_library = pytest.mark.skipif(not _library.is_loaded("cpu"), reason="the library is not built")


def uniform(*shape, seed=0, low=-5.0, high=5.0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).double() * (high - low) + low


def quadrilaterals(N):
    """Return rotated rectangles, either way round."""
    center, sides, angle = (
        uniform(N, 1, 2, seed=1, low=-3, high=3),
        uniform(N, 2, seed=2, low=0.5, high=6),
        uniform(N, seed=3),
    )
    signs = torch.tensor([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]]).double()
    corners = signs * sides[:, None]
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], 1).view(N, 2, 2)
    corners = center + corners @ turn
    corners[::2] = corners[::2].flip(1)
    return corners.flatten(1)


def point_sets(N):
    points = uniform(N, 18)
    points[: N // 3] = points[: N // 3].round()  # with equal points and points on a line
    return points


@pytest.mark.parametrize("device", DEVICES)
def test_convex_iou(device):
    points, polygons = point_sets(30), quadrilaterals(7)
    found = convex_iou(points.to(device), polygons.to(device))
    for n, numbers in enumerate(points.tolist()):
        for k, corners in enumerate(polygons.tolist()):
            one, other = hull(points_of(numbers)), points_of(corners)
            common = shared(one, other)
            expected = common / (area(one) + abs(area(other)) - common)
            assert found[n, k].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("device", DEVICES)
def test_convex_giou_and_its_gradient(device):
    points, polygons = uniform(12, 18), quadrilaterals(12)
    polygons[6:] += 4

    def giou(numbers, corners):
        one, other = hull(points_of(numbers)), points_of(corners)
        around, common = abs(area(hull(one + other))), shared(one, other)
        union = area(one) + abs(area(other)) - common
        return common / union - (around - union) / around

    found, gradient = convex_giou(points.to(device), polygons.to(device))
    for n in range(12):
        numbers, corners = points[n].tolist(), polygons[n].tolist()
        assert found[n].item() == pytest.approx(giou(numbers, corners), abs=1e-9)
        for i in range(18):
            ends = [
                giou([*numbers[:i], numbers[i] + step, *numbers[i + 1 :]], corners) for step in (1e-6, -1e-6)
            ]
            assert gradient[n, i].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_min_area_polygons(device):
    points = point_sets(40)
    found = min_area_polygons(points.to(device)).cpu()
    for numbers, box in zip(points.tolist(), found.tolist(), strict=True):
        corners, least = hull(points_of(numbers)), math.inf
        for a, b in zip(corners, corners[1:] + corners[:1], strict=True):
            angle = math.atan2(b[1] - a[1], b[0] - a[0])
            along = [x * math.cos(angle) + y * math.sin(angle) for x, y in corners]
            across = [y * math.cos(angle) - x * math.sin(angle) for x, y in corners]
            least = min(least, (max(along) - min(along)) * (max(across) - min(across)))
        box = points_of(box)
        assert abs(area(box)) == pytest.approx(least, rel=2e-6)
        orientation = math.copysign(1, area(box))
        for a, b in zip(box, box[1:] + box[:1], strict=True):
            assert all(orientation * cross(a, b, p) > -1e-9 for p in corners)


def test_min_area_polygons_by_hand():
    points = torch.tensor([[0.0, 0, 4, 0, 4, 2, 0, 2, 1, 1, 2, 1, 3, 1, 1, 0, 0, 1]])
    assert min_area_polygons(points).tolist() == [[4, 0, 0, 0, 0, 2, 4, 2]]
    assert min_area_polygons(points * 0 + 3).tolist() == [[3] * 8]
    assert convex_iou(points, torch.tensor([[0.0, 0, 2, 0, 2, 4, 0, 4]])).item() == pytest.approx(1 / 3)
    giou, gradient = convex_giou(points, torch.tensor([[0.0, 0, 4, 0, 4, 2, 0, 2]]))
    assert giou.item() == 1 and gradient.shape == (1, 18)


def test_the_gradient_where_sides_coincide_is_mmcvs():
    """A hull whose left and lower sides lie on those of the polygon; the shared area has 0 or 1 as derivative there."""
    points = torch.tensor([[1.0, 1, 2, 2, 1, 2, 2, 1, 1, 3, 3, 1, 2, 3, 3, 2, 1.5, 1.5]])
    giou, gradient = convex_giou(points, torch.tensor([[1.0, 1, 1, 2, 2, 2, 2, 1]]))
    assert giou.item() == pytest.approx(2 / 7)
    corners = [
        0.0204,
        0.0408,
        0,
        0,
        0,
        0,
        0,
        0,
        0.0612,
        -0.0408,
        -0.0408,
        0.0816,
        -0.0408,
        -0.0816,
        -0.0816,
        -0.0408,
        0,
        0,
    ]
    assert gradient[0].tolist() == pytest.approx(corners, abs=1e-4)


@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_the_overlap_and_its_gradient_in_line_with_the_origin_and_of_small_sets(size):
    """A square from the origin to (2, 2), and one from (1, 1) to (3, 3): the IoU is 1 / 7 and the hull has area 8."""
    points = size * torch.tensor([[0.0, 0, 2, 0, 2, 2, 0, 2, *[1.0, 0.5] * 5]], dtype=torch.float64)
    giou, gradient = convex_giou(points, size * torch.tensor([[1, 1, 3, 1, 3, 3, 1, 3]]).double())
    assert giou.item() == pytest.approx(1 / 7 - 1 / 8)
    # The corner (0, 0): moving it outward by x adds x to the set, to the union and to the common hull.
    expected = (1 / 49 - (8 - 7) / 64) / size
    assert gradient[0, :2].tolist() == pytest.approx([expected] * 2)


def problems(N):
    points, polygons = uniform(N, 18), quadrilaterals(N)
    whole, steps = polygons.round(), points[:, :9, None].round()
    concave = polygons.view(N, 4, 2).clone()
    concave[:, 2] = concave[:, 0] + 0.3 * (concave[:, 2] - concave[:, 0])
    return {
        "any": (points, polygons),
        "sides and corners coincide": (points.div(2).round(), whole),
        "concave": (points, concave.flatten(1)),
        "on a line": ((whole[:, None, :2] + steps * torch.tensor([1.0, -2.0])).flatten(1), whole),
        "equal points": (whole[:, :2].repeat(1, 9), whole),
        "polygons without area": (points.round(), whole[:, :4].repeat(1, 2)),
        "far away": (points + 500, polygons + 500),
        "small": (points * 1e-5, polygons * 1e-5),
    }


@needs_library
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", problems(0))
def test_the_kernels_are_the_references(kind, device, dtype):
    """They differ by roundings, also where mmcv's derivatives are between those of both sides."""
    points, polygons = (one.to(dtype) for one in problems(60)[kind])
    size = 1e-5 if kind == "small" else 1  # of boxes; derivatives grow with its inverse
    for name, scales, given in (
        ("min_area_polygons", (1 / size,), (points,)),
        ("convex_iou", (1,), (points, polygons[:7])),
        ("convex_giou", (1, size), (points, polygons)),
    ):
        found = getattr(torch.ops.visdet, name)(*(one.to(device) for one in given))
        expected = getattr(in_torch, f"{name}_reference")(*given)
        found, expected = (one if isinstance(one, tuple) else (one,) for one in (found, expected))
        for got, wanted, scale in zip(found, expected, scales, strict=True):
            close = dict(rtol=1e-6, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(got.cpu() * scale, wanted * scale, **close)


@pytest.mark.parametrize("device", DEVICES)
def test_points_in_polygons(device):
    points, polygons = uniform(60, 2), quadrilaterals(9)
    found = points_in_polygons(points.to(device), polygons.to(device))
    assert found.dtype == torch.float32 and found.any() and not found.all()
    for n, point in enumerate(points.tolist()):
        for m, corners in enumerate(polygons.tolist()):
            corners = points_of(corners)
            sides = [cross(a, b, point) > 0 for a, b in zip(corners, corners[1:] + corners[:1], strict=True)]
            assert found[n, m].item() == (all(sides) or not any(sides))
    concave = torch.tensor([[0.0, 0, 4, 0, 1, 1, 0, 4]])
    assert points_in_polygons(torch.tensor([[0.5, 0.5], [2.0, 2.0], [-1, 1]]), concave).tolist() == [
        [1],
        [0],
        [0],
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_chamfer_distance(device):
    one, other = uniform(2, 5, 2), uniform(2, 7, 2, seed=1)
    one[0, 3], other[1, 2] = one[0, 1], other[1, 6]
    found = chamfer_distance(one.to(device), other.to(device))
    for b in range(2):
        for distances, indices, points, others in (
            (found[0], found[2], one, other),
            (found[1], found[3], other, one),
        ):
            for n, (x, y) in enumerate(points[b].tolist()):
                apart = [(x - u) ** 2 + (y - v) ** 2 for u, v in others[b].tolist()]
                assert distances[b, n].item() == pytest.approx(min(apart))
                assert indices[b, n].item() == apart.index(min(apart)) and indices.dtype == torch.int32
    leaves = [uniform(2, n, 2, seed=n).to(device).requires_grad_() for n in (5, 7)]
    assert torch.autograd.gradcheck(lambda a, b: chamfer_distance(a, b)[:2], leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_chamfer_distances_of_narrow_types_are_rounded_once(dtype):
    one, other = uniform(1, 30, 2).to(dtype).requires_grad_(), uniform(1, 3, 2, seed=1).to(dtype)
    wide = one.detach().float().requires_grad_()
    found, exact = chamfer_distance(one, other), chamfer_distance(wide, other.float())
    for got, expected in zip(found[:2], exact[:2], strict=True):
        torch.testing.assert_close(got, expected.to(dtype), rtol=0, atol=0)
    gradients = [
        torch.autograd.grad(pair[0].sum() + pair[1].sum(), points)[0]
        for pair, points in ((found, one), (exact, wide))
    ]
    torch.testing.assert_close(gradients[0], gradients[1].to(dtype), rtol=0, atol=0)


def boxes(N, seed):
    return torch.cat(
        [
            uniform(N, 2, seed=seed, low=-2, high=2),
            uniform(N, 2, seed=seed + 1, low=0.5),
            uniform(N, 1, seed=seed + 2),
        ],
        1,
    )


@pytest.mark.parametrize("device", DEVICES)
def test_diff_iou_rotated(device):
    one, other = boxes(30, 0).to(device), boxes(30, 10).to(device)
    one[:, 2:4].clamp_(min=0.5), other[:, 2:4].clamp_(min=0.5)
    other[0] = one[0]
    flat = diff_iou_rotated_2d(one[None], other[None])
    torch.testing.assert_close(flat[0], box_iou_rotated(one, other, aligned=True))
    depth = torch.tensor([[0.0, 2], [1, 4]], device=device, dtype=torch.float64)
    solid = [
        torch.cat([b[:, :2], d[:1].expand(30, 1), b[:, 2:4], d[1:].expand(30, 1), b[:, 4:]], 1)
        for b, d in ((one, depth[0]), (other, depth[1]))
    ]
    areas = [b[:, 2] * b[:, 3] for b in (one, other)]
    common = flat[0] * (areas[0] + areas[1]) / (1 + flat[0])  # from z = -1 to 1, and from -1 to 3
    expected = (common * 2) / (areas[0] * 2 + areas[1] * 4 - common * 2)
    torch.testing.assert_close(diff_iou_rotated_3d(solid[0][None], solid[1][None])[0], expected)
    leaves = [t[None, 1:8].clone().requires_grad_() for t in (one, other)]
    assert torch.autograd.gradcheck(diff_iou_rotated_2d, leaves)


@pytest.mark.parametrize("call", [diff_iou_rotated_2d, diff_iou_rotated_3d])
def test_negative_sides_count_as_0_and_boxes_without_end_have_no_overlap(call):
    box = torch.tensor([0.0, 0, 0, 2, 1, 2, 0])
    turned, far, flat = box.clone(), box.clone(), box.clone()
    turned[3], far[2], flat[3:5] = -2, math.inf, -1
    if call is diff_iou_rotated_2d:
        far[0] = math.inf
    one, other = torch.stack([box, box, flat])[None], torch.stack([turned, far, flat])[None]
    if call is diff_iou_rotated_2d:
        one, other = (boxes[..., [0, 1, 3, 4, 6]] for boxes in (one, other))
    one.requires_grad_()
    found = call(one, other)
    assert found[0, 0].item() == 0 and found[0, 1:].isnan().all()  # -1 * -1 is not an area
    assert torch.autograd.grad(found[0, 0], one)[0][0, 0].isfinite().all()


def test_vertices_in_order():
    """A square of four corners of one box, as mmcv's wrapper describes it, and the same with each corner twice."""
    square = torch.tensor([[1.0, 1], [-1, 1], [-1, -1], [1, -1]])
    vertices, mask = torch.zeros(1, 3, 24, 2), torch.zeros(1, 3, 24, dtype=torch.bool)
    vertices[0, :, :4] = vertices[0, :, 4:8] = square
    mask[0, 0, :4], mask[0, 1, :8], mask[0, 2, :2] = True, True, True
    vertices[0, 1, 8:12], mask[0, 1, 8:12] = square, True
    found = sorted_vertices(vertices, mask, mask.sum(2))
    assert found[0, 0].tolist() == [0, 1, 2, 3, 0, 8, 8, 8, 8] and found[0, 2].tolist() == [8] * 9
    corners = vertices[0, 1][found[0, 1].long()]
    turning = corners[:-1, 0] * corners[1:, 1] - corners[:-1, 1] * corners[1:, 0]
    assert turning.sum() / 2 == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_types_and_bad_numbers(dtype):
    points, polygons = point_sets(6).to(dtype), quadrilaterals(6).to(dtype)
    close = dict(rtol=1e-2, atol=1e-2)
    exact = convex_giou(points.double(), polygons.double())
    for found, expected in zip(convex_giou(points, polygons), exact, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, **close)
    assert convex_iou(points, polygons).dtype == min_area_polygons(points).dtype == dtype
    points[0, 3], points[1, 2], polygons[2, 0] = math.nan, math.inf, math.nan
    giou, iou = convex_giou(points, polygons)[0], convex_iou(points, polygons)
    assert giou[:3].isnan().all() and giou[3:].isfinite().all()
    assert iou[:2].isnan().all() and iou[2:, 2].isnan().all() and iou[3:, 3:].isfinite().all()
    assert (
        points_in_polygons(points[:, :2], polygons).isfinite().all()
        and min_area_polygons(points)[2:].isfinite().all()
    )


def test_empties():
    points, polygons = torch.zeros(0, 18), torch.zeros(0, 8)
    assert convex_iou(points, torch.zeros(3, 8)).shape == (0, 3)
    assert convex_iou(torch.zeros(3, 18), polygons).shape == (3, 0)
    assert [t.shape for t in convex_giou(points, polygons)] == [(0,), (0, 18)]
    assert min_area_polygons(points).shape == (0, 8)
    assert points_in_polygons(torch.zeros(0, 2), torch.zeros(2, 8)).shape == (0, 2)
    distances = chamfer_distance(torch.ones(2, 3, 2), torch.ones(2, 0, 2))
    assert [tuple(t.shape) for t in distances] == [(2, 3), (2, 0), (2, 3), (2, 0)] and not distances[0].any()
    assert diff_iou_rotated_2d(torch.zeros(1, 0, 5), torch.zeros(1, 0, 5)).shape == (1, 0)
    assert sorted_vertices(
        torch.zeros(1, 0, 24, 2), torch.zeros(1, 0, 24).bool(), torch.zeros(1, 0)
    ).shape == (1, 0, 9)


X = torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convex_iou(X, X), r"convex_iou: pointsets must be \[N, 18\], got \[3, 4\]"),
        (lambda: convex_iou(torch.zeros(2, 18), X), r"convex_iou: polygons must be \[K, 8\], got \[3, 4\]"),
        (
            lambda: convex_giou(torch.zeros(2, 18), torch.zeros(3, 8)),
            r"polygons must be \[2, 8\].*got \[3, 8\]",
        ),
        (
            lambda: convex_iou(torch.zeros(2, 18).int(), torch.zeros(3, 8)),
            "convex_iou: pointsets must be of a floating-point type on cpu, got torch.int32 on cpu",
        ),
        (
            lambda: convex_giou(torch.zeros(2, 18), torch.zeros(2, 8, device="meta")),
            "convex_giou: polygons must be of a floating-point type on cpu, got torch.float32 on meta",
        ),
        (lambda: min_area_polygons(torch.zeros(2, 18).int()), "min_area_polygons: pointsets must be of a fl"),
        (lambda: chamfer_distance(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2).int()), "xyz2 must be of a fl"),
        (lambda: min_area_polygons(X), r"min_area_polygons: pointsets must be \[N, 18\], got \[3, 4\]"),
        (lambda: points_in_polygons(X, X), r"points_in_polygons: points must be \[N, 2\], got \[3, 4\]"),
        (lambda: chamfer_distance(X, X), r"chamfer_distance: xyz1 must be \[B, N, 2\], got \[3, 4\]"),
        (lambda: diff_iou_rotated_2d(X, X), r"box1 must be \[B, N, 5\] \(x, y, w, h, angle\), got \[3, 4\]"),
        (
            lambda: diff_iou_rotated_2d(torch.zeros(1, 2, 5), torch.zeros(1, 3, 5)),
            r"box2 must be \[1, 2, 5\] .*, got \[1, 3, 5\]",
        ),
        (
            lambda: diff_iou_rotated_2d(*[torch.zeros(1, 2, 5).int()] * 2),
            "box1 must be of a floating-point type",
        ),
        (lambda: diff_iou_rotated_3d(X, X), r"box3d1 must be \[B, N, 7\] .*, got \[3, 4\]"),
    ],
)
def test_rejections(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@needs_library
def test_rejections_of_the_operators():
    operators, points, polygons = torch.ops.visdet, torch.zeros(2, 18), torch.zeros(2, 8)
    for call, message in (
        (
            lambda: operators.min_area_polygons(X),
            r"min_area_polygons: pointsets must be \[N, 18\], got \[3, 4\]",
        ),
        (
            lambda: operators.min_area_polygons(points.half()),
            "min_area_polygons: pointsets must be .*, got Half",
        ),
        (lambda: operators.convex_iou(points, X), r"convex_iou: polygons must be \[K, 8\], got \[3, 4\]"),
        (lambda: operators.convex_iou(points, polygons.double()), "polygons must be Float, .*, got Double"),
        (lambda: operators.convex_giou(points, polygons[:1]), r"polygons must be \[2, 8\], got \[1, 8\]"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
