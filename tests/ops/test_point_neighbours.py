"""Ball query, nearest neighbours, furthest point sampling and gathering, against loops."""

import pytest
import torch

from visdet.ops import (
    _library,
    ball_query,
    furthest_point_sample,
    furthest_point_sample_with_dist,
    indice_conv,
    knn,
    local_aggregate,
    point_neighbours,
    roipoint_pool3d,
    stack_ball_query,
    three_nn,
)
from visdet.ops.mmcv.point_gathering import (
    assign_score_withk,
    gather_points,
    group_points,
    stack_group_points,
    three_interpolate,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def cloud(*shape, seed=0, dtype=torch.float32, device="cpu"):
    """Return points on a coarse grid, so that there are equal distances and equal points."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 7, shape, generator=generator) / 4).to(device, dtype)


def ball_loop(low, high, count, points, center):
    found = []
    for i, point in enumerate(points.double()):
        d2 = (center.double() - point).square().sum().item()
        if d2 == 0 or low**2 <= d2 < high**2:
            found.append(i)
    return (found + found[:1] * count)[:count] if found else [0] * count, len(found)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("low", [0.0, 0.6])
def test_ball_query_is_the_loop(dtype, low, device):
    points, centers = cloud(2, 30, 3, dtype=dtype), cloud(2, 11, 3, seed=1, dtype=dtype)
    centers[0, 0] = 50
    expected = [[ball_loop(low, 1.1, 5, p, c)[0] for c in cs] for p, cs in zip(points, centers, strict=True)]
    index = ball_query(low, 1.1, 5, points.to(device), centers.to(device))
    assert index.dtype == torch.int32
    assert index.tolist() == expected


def test_points_that_are_nan_are_in_no_ball_and_nobodys_neighbours(device):
    points = torch.tensor([[[torch.nan, 0, 0], [0.1, 0, 0], [0.2, 0, 0]]], device=device)
    center = torch.zeros(1, 1, 3, device=device)
    assert ball_query(0, 1, 3, points, center).tolist() == [[[1, 2, 1]]]
    index, distances = knn(3, points, center)
    assert index.tolist() == [[[1, 2, 0]]] and distances[0, 0, 2] == torch.inf
    points[0, 0, 0] = -torch.inf
    center[0, 0, 0] = -torch.inf  # inf - inf is a NaN whose sign bit is set on some processors
    index, distances = point_neighbours.knn_reference(points, center, 2)
    assert index.tolist() == [[[0, 0]]] and distances.isinf().all()


def test_stack_ball_query_is_the_loop_over_each_cloud(device):
    sizes, center_sizes = [9, 0, 20], [3, 2, 4]
    points, centers = cloud(29, 3), cloud(9, 3, seed=1)
    expected = []
    for p, cs in zip(points.split(sizes), centers.split(center_sizes), strict=True):
        for c in cs:
            index, found = ball_loop(0, 0.8, 3, p, c)
            expected.append(index if found else [-1, 0, 0])
    counts = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (sizes, center_sizes))
    at, centers_at = counts
    index = stack_ball_query(0.8, 3, points.to(device), at, centers.to(device), centers_at)
    assert index.tolist() == expected


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("k", [1, 3, 12, 40])
def test_knn_is_a_stable_sort_of_distances(dtype, k, device):
    points, centers = cloud(2, 30, 3, dtype=dtype), cloud(2, 7, 3, seed=1, dtype=dtype)
    distances = (centers.double()[:, :, None] - points.double()[:, None]).square().sum(3)
    expected = distances.sort(dim=2, stable=True)
    index, squared = knn(k, points.to(device), centers.to(device))
    few = min(k, 30)
    assert index[:, :, :few].tolist() == expected.indices[:, :, :few].tolist()
    assert squared[:, :, :few].cpu().double().equal(expected.values[:, :, :few])
    assert (index[:, :, few:] == 0).all() and squared[:, :, few:].isinf().all()


def test_three_nn_gives_distances_of_three_neighbours(device):
    source, target = cloud(2, 9, 3).to(device), cloud(2, 5, 3, seed=1).to(device)
    distances, index = three_nn(target, source)
    near = source[torch.arange(2, device=device)[:, None, None], index.long()]
    torch.testing.assert_close(distances, (near - target[:, :, None]).norm(dim=3))
    assert (distances.diff(dim=2) >= 0).all()


def furthest_loop(points, count):
    chosen = [0]
    nearest = [1e10] * len(points)
    while len(chosen) < count:
        for i, point in enumerate(points):
            nearest[i] = min(nearest[i], float((point - points[chosen[-1]]).square().sum()))
        chosen.append(max(range(len(points)), key=lambda i: (nearest[i], -i)))
    return chosen[:count]


@pytest.mark.parametrize("dtype", TYPES)
def test_furthest_point_sample_is_the_loop(dtype, device):
    points = cloud(3, 20, 3, dtype=dtype)
    index = furthest_point_sample(points.to(device), 15)
    assert index.dtype == torch.int32
    assert index.tolist() == [furthest_loop(p.double(), 15) for p in points]
    pairs = (points.double()[:, :, None] - points.double()[:, None]).square().sum(3).to(device)
    assert furthest_point_sample_with_dist(pairs, 15).tolist() == index.tolist()
    # More samples than points repeat points.
    assert furthest_point_sample(points.to(device), 30).shape == (3, 30)


def test_grouping_is_indexing(device):
    features = torch.rand(2, 4, 9, device=device)
    index = torch.randint(0, 9, (2, 5, 3), dtype=torch.int32, device=device)
    grouped, gathered = group_points(features, index), gather_points(features, index[..., 0])
    for b in range(2):
        for m in range(5):
            assert torch.equal(grouped[b, :, m], features[b][:, index[b, m].long()])
            assert torch.equal(gathered[b, :, m], features[b][:, index[b, m, 0]])


def test_stacked_groups_are_zero_where_an_index_leaves_its_cloud(device):
    features = torch.rand(7, 2, device=device)
    sizes, groups = torch.tensor([3, 4], device=device), torch.tensor([2, 1], device=device)
    index = torch.tensor([[0, 2], [3, -1], [3, 0]], dtype=torch.int32, device=device)
    grouped = stack_group_points(features, sizes.int(), index, groups.int())
    assert torch.equal(grouped[0], features[[0, 2]].T) and (grouped[1] == 0).all()
    assert torch.equal(grouped[2], features[[6, 3]].T)


@pytest.mark.parametrize("D", [1, 2, 5])
def test_knn_of_features_is_the_loop(D, device):
    points, centers = cloud(2, 9, D, device=device), cloud(2, 4, D, seed=1, device=device)
    index, distances = knn(3, points, centers)
    expected = (centers[:, :, None] - points[:, None]).square().sum(3).sort(dim=2, stable=True)
    assert torch.equal(distances, expected.values[..., :3])
    assert torch.equal(index.long(), expected.indices[..., :3])
    with pytest.raises(ValueError, match=rf"knn: center_xyz must be \[2, M, {D}\], got \[2, 4, {D + 1}\]"):
        knn(3, points, torch.zeros(2, 4, D + 1, device=device))


def pool_in_equal_boxes(features, count):
    points, boxes = features.new_zeros(1, 1, 3), features.new_ones(1, count, 7)
    return roipoint_pool3d(points + 1, features, boxes, 1)[0][..., 3]


def convolve_by_many_taps(features, count):
    pairs = torch.zeros(count, 2, 1, dtype=torch.int32, device=features.device)
    pairs[:, 1, 0] = torch.arange(count)
    filters = features.new_ones(count, 1, 1, 1, 1)
    return indice_conv(features[0], filters, pairs, torch.ones_like(pairs[:, 0, 0]), count)


def spread_to_equal_points(features, count):
    points, mean = features.new_zeros(count, 3), features.new_zeros(1, 3)
    gaussian = mean.int(), features.new_ones(1), features[0], mean.int()[0, :1], features.new_ones(1, 6)
    return local_aggregate(points, points.int(), mean, *gaussian, 1, 1, 1)


def assign_to_equal_groups(features, count):
    index, scores = features.new_zeros(1, count, 1).int(), features.new_ones(1, count, 1, 1)
    return assign_score_withk(scores, features[..., None], features.detach()[..., None], index)


@pytest.mark.parametrize(
    "spread",
    [
        lambda features, count: group_points(features, features.new_zeros(1, count, 1).int()),
        pool_in_equal_boxes,
        convolve_by_many_taps,
        spread_to_equal_points,
        assign_to_equal_groups,
    ],
    ids=["group_points", "roipoint_pool3d", "indice_conv", "local_aggregate", "assign_score_withk"],
)
def test_gradients_of_many_equal_points_are_summed_in_float32(spread, device):
    features = torch.ones(1, 1, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    result = spread(features, 300)
    assert result.numel() == 300
    result.backward(torch.ones_like(result))
    assert features.grad.item() == 300  # In bfloat16, 256 + 1 is 256.


def test_assign_score_withk_is_the_loop(device):
    B, P, K, M, N, C = 2, 3, 4, 2, 6, 5
    scores, points, centers = torch.rand(B, P, K, M), torch.rand(B, N, M, C), torch.rand(B, N, M, C)
    index = torch.randint(0, N, (B, P, K))
    index[0, 0, 2], index[1, 1, 3] = N, -1
    expected = torch.zeros(B, C, P, K)
    for b, p, k in torch.cartesian_prod(*map(torch.arange, (B, P, K))).tolist():
        if 0 <= index[b, p, k] < N:
            difference = points[b, index[b, p, k]] - centers[b, index[b, p, 0]]
            expected[b, :, p, k] = (scores[b, p, k, :, None] * difference).sum(0)
    result = assign_score_withk(*(t.to(device) for t in (scores, points, centers, index)))
    torch.testing.assert_close(result.cpu(), expected)


def test_what_is_not_a_neighbour_of_assign_score_withk_contributes_nothing(device):
    scores = torch.ones(1, 2, 2, 1, device=device, requires_grad=True)
    points = torch.tensor([torch.nan, 1.0], device=device).view(1, 2, 1, 1)
    index = torch.tensor([[[1, -1], [2, 1]]], device=device)  # The center of the second group is none.
    result = assign_score_withk(scores, points, torch.zeros_like(points), index)
    result.sum().backward()
    assert result.tolist() == [[[[1.0, 0.0], [0.0, 0.0]]]]
    assert scores.grad.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]


def test_gradients():
    def wide(*shape):
        return torch.rand(shape, dtype=torch.float64, requires_grad=True)

    index = torch.randint(0, 5, (2, 4, 3))
    sizes = torch.tensor([2, 3]), torch.tensor([1, 3])
    check = torch.autograd.gradcheck
    assert check(lambda f: group_points(f, index), wide(2, 3, 5))
    assert check(lambda f: stack_group_points(f, sizes[0], index[0], sizes[1]), wide(5, 2))
    assert check(lambda f, w: three_interpolate(f, index, w), (wide(2, 3, 5), wide(2, 4, 3)))
    scores = wide(2, 4, 3, 2), wide(2, 5, 2, 3), wide(2, 5, 2, 3)
    assert check(lambda *given: assign_score_withk(*given, index), scores)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda x: ball_query(0, 1, 2, x[..., :2], x),
            r"ball_query: xyz must be \[B, N, 3\], got \[2, 4, 2\]",
        ),
        (lambda x: ball_query(0, 1, 2, x, x[:1]), r"center_xyz must be \[2, M, 3\], got \[1, 4, 3\]"),
        (lambda x: ball_query(0, 1, -1, x, x), "ball_query: sample_num must be 0 or more, got -1"),
        (lambda x: knn(0, x, x), "knn: k must be at least 1, got 0"),
        (lambda x: knn(1, x[0], x), r"knn: xyz must be \[B, N, D\]"),
        (lambda x: three_nn(x[0], x), r"three_nn: target must be \[2, N, 3\], got \[4, 3\]"),
        (lambda x: furthest_point_sample(x, -1), "num_points must be 0 or more for 4 points, got -1"),
        (lambda x: furthest_point_sample(x[:, :0], 1), "num_points must be 0 for 0 points, got 1"),
        (
            lambda x: furthest_point_sample_with_dist(x, 1),
            r"points_dist must be \[B, N, N\], got \[2, 4, 3\]",
        ),
        (lambda x: group_points(x, x[:1].long()), r"group_points: indices must be \[2, M, K\]"),
        (lambda x: gather_points(x, x.long()), r"gather_points: indices must be \[2, M\]"),
        (lambda x: three_interpolate(x, x.long(), x[:, :2]), r"weight must be \[2, 4, 3\], got \[2, 2, 3\]"),
        (
            lambda x: stack_ball_query(1, 2, x[0], torch.tensor([3]), x[0], torch.tensor([4])),
            r"stack_ball_query: xyz_batch_cnt must add up to the 4 rows of xyz, got \[3\]",
        ),
        (
            lambda x: stack_group_points(x[0], torch.tensor([1, 3]), x[0].long(), torch.tensor([4])),
            r"stack_group_points: indices_batch_cnt must be \[2\], got \[1\]",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 4, 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, other: ball_query(0, 1, 2, x, other),
        lambda x, other: knn(2, x, other),
        lambda x, other: torch.ops.visdet.box_iou_rotated(
            x[0, :, [0, 1, 2, 0, 1]], other[0, :, [0, 1, 2, 0, 1]], 0, False
        ),
        lambda x, other: torch.ops.visdet.nms(x[0, :, [0, 1, 2, 0]], other[0, :, 0], None, None, 0.5),
    ],
    ids=["ball_query", "knn", "box_iou_rotated", "nms"],
)
def test_tensors_without_data_beside_others_are_refused(call):
    if not _library.is_loaded("cpu"):
        pytest.skip("the library is not built")
    with pytest.raises(RuntimeError, match=r"must be on the device cpu of \w+, got meta"):
        call(torch.zeros(2, 4, 3), torch.zeros(2, 4, 3, device="meta"))


def test_the_gradient_of_interpolation_is_summed_before_it_is_rounded(device):
    features = torch.ones(1, 1, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    index = torch.zeros(1, 1, 3, dtype=torch.int32, device=device)
    weight = torch.full((1, 1, 3), 1 + 0.45 * 2**-7, device=device)  # each alone rounds to 1
    three_interpolate(features, index, weight).backward(
        torch.ones(1, 1, 1, dtype=torch.bfloat16, device=device)
    )
    assert features.grad.item() == 3 + 2**-6
