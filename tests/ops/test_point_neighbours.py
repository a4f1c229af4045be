"""Ball query, nearest neighbours, furthest point sampling and gathering, against loops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import (
    FLOATING,
    Draw,
    Operator,
    Problem,
    draw_cloud,
    generator_of,
    nothing,
    rand,
    wide_of,
)
from visdet.execution.tensor_tree import map_tensors, tensors_of
from visdet.ops import (
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
from visdet.ops.furthest_point_sample import furthest_point_sample_reference
from visdet.ops.mmcv.point_gathering import (
    assign_score_withk,
    group_points,
    three_interpolate,
)
from visdet.ops.point_neighbours import ball_query_reference, knn_reference


def _sizes(draw: Draw) -> tuple[int, int, int]:
    """Return the numbers of clouds, points and centers."""
    return draw.size(3), draw.pick(3000, 9000) if draw.is_big else draw.size(130), draw.size(40)


def same_bits(reference: Callable[..., Any], rtol: float = 0) -> Callable[[Problem, Any, Any], str]:
    """Return a comparison with what the reference gives for the very arguments of the call, except for ``rtol``."""

    def compare(problem: Problem, got: Any, expected: Any) -> str:
        wanted = tensors_of(reference(**map_tensors(Tensor.detach, problem.arguments)))
        for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
            if one.dtype != other.dtype or one.shape != other.shape:
                return f"result {number} is {one.dtype} {list(one.shape)}, expected {other.dtype} {list(other.shape)}"
            if not torch.allclose(one, other, rtol=rtol, atol=0, equal_nan=True):
                return f"result {number}: {one.tolist()}, expected {other.tolist()}"
        return ""

    return compare


def _draw_balls(draw: Draw) -> Problem:
    (B, N, M), dtype = _sizes(draw), draw.dtype()
    arguments = {
        "min_radius": draw.pick(0.0, 0.0, 0.5),
        "max_radius": draw.pick(0.0, 0.5, 1.5, 100.0),
        "sample_num": draw.size(40),
        "xyz": draw.place(draw_cloud(draw, B, N, 3), dtype),
        "center_xyz": draw.place(draw_cloud(draw, B, M, 3), dtype),
    }
    return Problem(arguments)


def _widened(points: Tensor) -> Tensor:
    return points.to(wide_of(points.dtype))


def _balls(min_radius: float, max_radius: float, sample_num: int, xyz: Tensor, center_xyz: Tensor) -> Tensor:
    return ball_query_reference(
        _widened(xyz), _widened(center_xyz), min_radius**2, max_radius**2, sample_num, False
    )


def _draw_stacked_balls(draw: Draw) -> Problem:
    clouds, dtype = draw.size(4), draw.dtype()
    counts, center_counts = ([draw.size(60, 0.1) for _ in range(clouds)] for _ in range(2))
    arguments = {
        "max_radius": draw.pick(0.0, 0.5, 1.5, 100.0),
        "sample_num": draw.size(40),
        "xyz": draw.place(draw_cloud(draw, sum(counts), 3), dtype),
        "xyz_batch_cnt": draw.place(torch.tensor(counts, dtype=torch.int32), can_expand=False),
        "center_xyz": draw.place(draw_cloud(draw, sum(center_counts), 3), dtype),
        "center_xyz_batch_cnt": draw.place(torch.tensor(center_counts, dtype=torch.int32), can_expand=False),
    }
    return Problem(arguments)


def _stacked_balls(
    max_radius: float,
    sample_num: int,
    xyz: Tensor,
    xyz_batch_cnt: Tensor,
    center_xyz: Tensor,
    center_xyz_batch_cnt: Tensor,
) -> Tensor:
    clouds = _widened(xyz).split(xyz_batch_cnt.tolist())
    centers = _widened(center_xyz).split(center_xyz_batch_cnt.tolist())
    options = 0.0, max_radius**2, sample_num, True
    parts = [
        ball_query_reference(one[None], its[None], *options)[0]
        for one, its in zip(clouds, centers, strict=True)
    ]
    return torch.cat([torch.zeros(0, sample_num, dtype=torch.int32, device=xyz.device), *parts])


def _draw_knn(draw: Draw) -> Problem:
    (B, N, M), dtype = _sizes(draw), draw.dtype()
    arguments = {
        "k": draw.pick(1, 3, draw.size(20, 0), 100, 130),
        "xyz": draw.place(draw_cloud(draw, B, N, 3), dtype),
        "center_xyz": draw.place(draw_cloud(draw, B, M, 3), dtype),
    }
    return Problem(arguments)


def _nearest(k: int, xyz: Tensor, center_xyz: Tensor) -> tuple[Tensor, Tensor]:
    return knn_reference(_widened(xyz), _widened(center_xyz), k)


def _draw_three(draw: Draw) -> Problem:
    given = _draw_knn(draw).arguments
    return Problem({"target": given["center_xyz"], "source": given["xyz"]})


def _three(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    index, distances = _nearest(3, source, target)
    return distances.sqrt().to(target.dtype), index


def _draw_samples(draw: Draw) -> Problem:
    B, N, _ = _sizes(draw)
    points = draw.place(draw_cloud(draw, B, N, 3), draw.dtype())
    return Problem({"points_xyz": points, "num_points": draw.size(50) if N else 0})


def _draw_samples_of_table(draw: Draw) -> Problem:
    B, N = draw.size(3), draw.size(90)
    table = draw.place(draw_cloud(draw, B, N, N), draw.dtype())
    return Problem({"points_dist": table, "num_points": draw.size(50) if N else 0})


def _samples(points_xyz: Tensor, num_points: int) -> Tensor:
    return furthest_point_sample_reference(_widened(points_xyz), num_points, False)


def _samples_of_table(points_dist: Tensor, num_points: int) -> Tensor:
    return furthest_point_sample_reference(_widened(points_dist), num_points, True)


def _of_centers(**settings: Any) -> Callable[[int], Problem]:
    """Return a function of a number of centers, which looks for their neighbours in small clouds."""
    return lambda n: Problem(dict(settings, xyz=rand(2, 7, 3), center_xyz=rand(2, n, 3)))


CLOUDS = dict(xyz="B N 3", center_xyz="B M 3")

OPERATORS = (
    Operator(
        "ball_query",
        ball_query,
        _draw_balls,
        nothing,
        compare=same_bits(_balls),
        of_size=(
            _of_centers(min_radius=0, max_radius=0.5, sample_num=4),
            lambda n: Problem(
                dict(min_radius=0, max_radius=0.5, sample_num=4, xyz=rand(2, n, 3), center_xyz=rand(2, 5, 3))
            ),
        ),
        launches=sizes.arguments(min_radius=0, max_radius=1, sample_num=sizes.small, **CLOUDS),
    ),
    Operator(
        "stack_ball_query",
        stack_ball_query,
        _draw_stacked_balls,
        nothing,
        compare=same_bits(_stacked_balls),
        spoiled={"xyz": (0,), "center_xyz": (0,)},
        aliases=("ball_query",),
    ),
    Operator(
        "knn",
        knn,
        _draw_knn,
        nothing,
        compare=same_bits(_nearest),
        of_size=(
            _of_centers(k=4),
            lambda n: Problem(dict(k=4, xyz=rand(n, 7, 3), center_xyz=rand(n, 5, 3))),
        ),
        launches=sizes.arguments(k=st.integers(1, 130), **CLOUDS),
    ),
    Operator(
        "three_nn",
        three_nn,
        _draw_three,
        nothing,
        compare=same_bits(_three, rtol=2e-7),  # torch rounds roots differently on the CPU and on CUDA
        aliases=("knn",),
        of_size=(lambda n: Problem(dict(target=rand(2, n, 3), source=rand(2, 7, 3))),),
    ),
    Operator(
        "furthest_point_sample",
        furthest_point_sample,
        _draw_samples,
        nothing,
        compare=same_bits(_samples),
        of_size=(lambda n: Problem(dict(points_xyz=rand(n, 9, 3), num_points=5)),),
        launches=sizes.arguments(points_xyz="B N 3", num_points=sizes.small),
    ),
    Operator(
        "furthest_point_sample_with_dist",
        furthest_point_sample_with_dist,
        _draw_samples_of_table,
        nothing,
        compare=same_bits(_samples_of_table),
        aliases=("furthest_point_sample",),
        of_size=(lambda n: Problem(dict(points_dist=rand(n, 9, 9), num_points=5)),),
    ),
)


of_all_types = pytest.mark.parametrize("dtype", FLOATING)


def cloud(*shape, seed=0, dtype=torch.float32, device="cpu"):
    """Return points on a coarse grid, so that there are equal distances and equal points."""
    generator = generator_of(seed)
    return (torch.randint(0, 7, shape, generator=generator) / 4).to(device, dtype)


def squared_distances(one, other):
    return (one.double()[:, :, None] - other.double()[:, None]).square().sum(3)


@of_all_types
@pytest.mark.parametrize("low", [0.0, 0.6])
def test_ball_query_takes_the_first_points_that_are_near(dtype, low, device):
    points, centers = cloud(2, 30, 3, dtype=dtype), cloud(2, 11, 3, seed=1, dtype=dtype)
    centers[0, 0] = 50
    squared = squared_distances(centers, points)
    is_near = (squared == 0) | (squared >= low**2) & (squared < 1.1**2)
    index = ball_query(low, 1.1, 5, points.to(device), centers.to(device))
    assert index.dtype == torch.int32
    for found, near in zip(index.flatten(0, 1).tolist(), is_near.flatten(0, 1), strict=True):
        row = near.nonzero()[:, 0].tolist() or [0]
        assert found == (row + row[:1] * 5)[:5]


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


@of_all_types
@pytest.mark.parametrize(("k", "D"), [(1, 3), (3, 3), (12, 3), (40, 3), (3, 1), (3, 2), (3, 5)])
def test_knn_is_a_stable_sort_of_distances(dtype, k, D, device):
    points, centers = cloud(2, 30, D, dtype=dtype), cloud(2, 7, D, seed=1, dtype=dtype)
    distances = squared_distances(centers, points)
    expected = distances.sort(dim=2, stable=True)
    index, squared = knn(k, points.to(device), centers.to(device))
    few = min(k, 30)
    assert index[:, :, :few].tolist() == expected.indices[:, :, :few].tolist()
    assert squared[:, :, :few].cpu().double().equal(expected.values[:, :, :few])
    assert (index[:, :, few:] == 0).all() and squared[:, :, few:].isinf().all()


def furthest_loop(distances, count):
    chosen, nearest = [0], distances[0]
    while len(chosen) < count:
        chosen.append(nearest.tolist().index(nearest.max()))
        nearest = nearest.minimum(distances[chosen[-1]])
    return chosen


@of_all_types
def test_furthest_point_sample_is_the_loop(dtype, device):
    points = cloud(3, 20, 3, dtype=dtype)
    pairs = squared_distances(points, points)
    index = furthest_point_sample(points.to(device), 15)
    assert index.dtype == torch.int32
    assert index.tolist() == [furthest_loop(distances, 15) for distances in pairs]
    assert furthest_point_sample_with_dist(pairs.to(device), 15).tolist() == index.tolist()
    # More samples than points repeat points.
    assert furthest_point_sample(points.to(device), 30).shape == (3, 30)


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


def test_what_is_not_a_neighbour_of_assign_score_withk_contributes_nothing(device):
    scores = torch.ones(1, 2, 2, 1, device=device, requires_grad=True)
    points = torch.tensor([torch.nan, 1.0], device=device).view(1, 2, 1, 1)
    index = torch.tensor([[[1, -1], [2, 1]]], device=device)  # The center of the second group is none.
    result = assign_score_withk(scores, points, torch.zeros_like(points), index)
    result.sum().backward()
    assert result.tolist() == [[[[1.0, 0.0], [0.0, 0.0]]]]
    assert scores.grad.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]


POINTS = torch.zeros(4, 3)
REFUSED = [
    (lambda: furthest_point_sample(torch.zeros(2, 0, 3), 1), "num_points must be 0 for 0 points, got 1"),
    (
        lambda: stack_ball_query(1, 2, POINTS, torch.tensor([3]), POINTS, torch.tensor([4])),
        r"stack_ball_query: xyz_batch_cnt must add up to the 4 rows of xyz, got \[3\]",
    ),
]


def test_the_gradient_of_interpolation_is_summed_before_it_is_rounded(device):
    features = torch.ones(1, 1, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    index = torch.zeros(1, 1, 3, dtype=torch.int32, device=device)
    weight = torch.full((1, 1, 3), 1 + 0.45 * 2**-7, device=device)  # each alone rounds to 1
    three_interpolate(features, index, weight).backward(
        torch.ones(1, 1, 1, dtype=torch.bfloat16, device=device)
    )
    assert features.grad.item() == 3 + 2**-6
