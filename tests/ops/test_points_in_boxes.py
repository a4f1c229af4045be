"""Points in 3-D boxes and their pooling, against loops."""

import math

import pytest
import torch

from visdet.ops.mmcv.points_in_boxes import (
    points_in_boxes_all,
    points_in_boxes_part,
    roiaware_pool3d,
    roipoint_pool3d,
)

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def scene(N=60, M=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(N, 3, generator=generator) * 4
    boxes = torch.rand(M, 7, generator=generator) * 2 + 0.5
    boxes[:, 6] = torch.rand(M, generator=generator) * 7 - 3
    boxes[-1, :3] = 50  # an empty box
    return points, boxes


def place(point, box):
    """Return the point in the axes of the box, from the center of its bottom, or None."""
    cx, cy, bottom, dx, dy, dz, heading = box.double().tolist()
    x, y, z = (p - c for p, c in zip(point.double().tolist(), (cx, cy, bottom), strict=True))
    x, y = x * math.cos(heading) + y * math.sin(heading), y * math.cos(heading) - x * math.sin(heading)
    return (x, y, z) if abs(x) < dx / 2 and abs(y) < dy / 2 and 0 <= z <= dz else None


def test_points_in_boxes_are_the_loop(device):
    points, boxes = scene()
    inside = [[place(point, box) is not None for box in boxes] for point in points]
    every = points_in_boxes_all(points[None].to(device), boxes[None].to(device))
    assert every.dtype == torch.int32 and every[0].tolist() == inside
    first = points_in_boxes_part(points[None].to(device), boxes[None].to(device))
    assert first[0].tolist() == [row.index(True) if any(row) else -1 for row in inside]
    assert 0 < sum(map(any, inside)) < len(points)


def test_sides_and_bottoms(device):
    box = torch.tensor([[[0.0, 0, 0, 2, 2, 2, 0]]], device=device)
    points = torch.tensor([[[0.0, 0, 0], [0, 0, 2], [1, 0, 1], [0, -1, 1], [torch.nan, 0, 0]]], device=device)
    assert points_in_boxes_part(points, box).tolist() == [[0, 0, -1, -1, -1]]
    turned = torch.tensor([[[0.0, 0, 0, 4, 1, 2, math.pi / 2]]], device=device)
    along = torch.tensor([[[0.0, 1.8, 1], [1.8, 0, 1]]], device=device)
    assert points_in_boxes_part(along, turned).tolist() == [[0, -1]]


@pytest.mark.parametrize("mode", ["max", "avg"])
@pytest.mark.parametrize("most", [128, 3, 1])
def test_roiaware_pool3d_is_the_loop(mode, most, device):
    points, boxes = scene(120)
    features = torch.randn(120, 4, generator=torch.Generator().manual_seed(1))
    features[3, 0] = torch.nan if mode == "max" else 1
    size = (2, 3, 4)
    expected = torch.zeros(len(boxes), *size, 4)
    for m, box in enumerate(boxes):
        members = {}
        for n, point in enumerate(points):
            if (at := place(point, box)) is not None:
                shifted = (at[0] + float(box[3]) / 2, at[1] + float(box[4]) / 2, at[2])
                cell = (int(a / float(side) * n) for a, side, n in zip(shifted, box[3:6], size, strict=True))
                voxel = tuple(min(c, n - 1) for c, n in zip(cell, size, strict=True))
                members.setdefault(voxel, []).append(n)
        for voxel, chosen in members.items():
            if chosen := chosen[: most - 1]:
                values = features[chosen]
                known = values.nan_to_num(nan=-torch.inf).amax(0)
                largest = torch.where(known.isinf(), 0, known)
                expected[m][voxel] = largest if mode == "max" else values.mean(0)
    pooled = roiaware_pool3d(*(t.to(device) for t in (boxes, points, features)), size, most, mode)
    torch.testing.assert_close(pooled.cpu(), expected)


def test_roipoint_pool3d_repeats_the_points_of_a_box(device):
    points, boxes = scene(40)
    features = torch.rand(2, 40, 3)
    pooled, is_empty = roipoint_pool3d(
        points.expand(2, -1, -1).to(device), features.to(device), boxes.expand(2, -1, -1).to(device), 9
    )
    for b in range(2):
        for m, box in enumerate(boxes):
            inside = [n for n, point in enumerate(points) if place(point, box) is not None]
            assert is_empty[b, m] == (not inside)
            if not inside:
                assert (pooled[b, m] == 0).all()
                continue
            chosen = [inside[i % len(inside)] for i in range(9)]
            expected = torch.cat([points[chosen], features[b, chosen]], 1)
            assert torch.equal(pooled[b, m].cpu(), expected)
    assert is_empty[0, -1] == 1


def test_voxels_of_an_infinite_box_are_empty(device):
    box = torch.tensor([[0.0, 0, 0, 2, torch.inf, 2, 0]], device=device)
    point, feature = torch.tensor([[0.5, 0.5, 0.5]], device=device), torch.ones(1, 1, device=device)
    for mode in ("max", "avg"):
        assert (roiaware_pool3d(box, point, feature, 2, 4, mode) == 0).all()


def test_features_of_points_in_no_box_have_a_gradient_of_zero(device):
    points, boxes = torch.rand(1, 9, 3, device=device), torch.full((1, 2, 7), 99.0, device=device)
    features = torch.rand(1, 9, 2, device=device, requires_grad=True)
    for mode in ("max", "avg"):
        roiaware_pool3d(boxes[0], points[0], features[0], 2, 4, mode).sum().backward()
    roipoint_pool3d(points, features, boxes, 4)[0].sum().backward()
    assert (features.grad == 0).all()


def test_gradients():
    points, boxes = scene(30)
    points, boxes = points.double(), boxes.double()
    features = torch.rand(30, 2, dtype=torch.float64, requires_grad=True)
    check = torch.autograd.gradcheck
    for mode in ("max", "avg"):
        assert check(lambda f, how=mode: roiaware_pool3d(boxes, points, f, (2, 1, 2), 5, how), features)
    assert check(lambda f: roipoint_pool3d(points[None], f[None], boxes[None], 4)[0], features)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, b: points_in_boxes_part(x[0], b), r"points must be \[B, N, 3\], got \[4, 3\]"),
        (lambda x, b: points_in_boxes_all(x, b[..., :6]), r"boxes must be \[1, M, 7\], got \[1, 2, 6\]"),
        (
            lambda x, b: roiaware_pool3d(b[0], x[0], x[0], 2, 3, "sum"),
            "mode must be 'max' or 'avg', got 'sum'",
        ),
        (lambda x, b: roiaware_pool3d(b[0], x[0], x[0], 2, 0), "max_pts_per_voxel must be at least 1, got 0"),
        (
            lambda x, b: roiaware_pool3d(b[0], x[0], x[0, :2], 2),
            r"pts_feature must be \[4, C\], got \[2, 3\]",
        ),
        (
            lambda x, b: roipoint_pool3d(x, x[:, :1], b),
            r"point_features must be \[1, 4, C\], got \[1, 1, 3\]",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(1, 4, 3), torch.ones(1, 2, 7))


@pytest.mark.filterwarnings("ignore:.*[Oo]verriding")
def test_an_error_of_torch_within_a_kernel_is_in_the_message():
    def cos(x):
        raise RuntimeError("no cosine today")

    points, boxes = scene()
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("cos", cos, "CPU")
        # Before torch 2.13, no function returns the text, which is on stderr.
        text = "no cosine today" if TORCH >= (2, 13) else "the reason is on stderr"
        with pytest.raises(RuntimeError, match=f"(?s)aten::cos: .*{text}"):
            points_in_boxes_all(points[None], boxes[None])
    assert points_in_boxes_all(points[None], boxes[None]).any()
