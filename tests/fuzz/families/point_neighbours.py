"""Problems of ball_query, stack_ball_query, knn, three_nn and furthest point sampling. Results are those of plain
torch to the bit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import Draw, Operator, Problem, rand, wide_of
from visdet.ops import (
    ball_query,
    furthest_point_sample,
    furthest_point_sample_with_dist,
    knn,
    stack_ball_query,
    three_nn,
)
from visdet.ops.furthest_point_sample import furthest_point_sample_reference
from visdet.ops.point_neighbours import ball_query_reference, knn_reference

__all__ = ["OPERATORS", "draw_cloud", "same_bits"]


def draw_cloud(draw: Draw, *shape: int) -> Tensor:
    """Return points. In some problems many lie on a grid, so that points and distances are equal."""
    points = draw.numbers(*shape)
    return draw.with_bad_numbers((points * 2).round() / 2 if draw.chance(0.4) else points)


def _sizes(draw: Draw) -> tuple[int, int, int]:
    """Return the numbers of clouds, points and centers."""
    return draw.size(3), draw.pick(3000, 9000) if draw.is_big else draw.size(130), draw.size(40)


def same_bits(reference: Callable[..., Any], rtol: float = 0) -> Callable[[Problem, Any, Any], str]:
    """Return a comparison with what the reference gives for the very arguments of the call, except for ``rtol``."""

    def compare(problem: Problem, got: Any, expected: Any) -> str:
        given = problem.arguments
        wanted = reference(
            **{name: value.detach() if isinstance(value, Tensor) else value for name, value in given.items()}
        )
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
            if one.dtype != other.dtype or one.shape != other.shape:
                return f"result {number} is {one.dtype} {list(one.shape)}, expected {other.dtype} {list(other.shape)}"
            if not torch.allclose(one, other, rtol=rtol, atol=0, equal_nan=True):
                return f"result {number}: {one.tolist()}, expected {other.tolist()}"
        return ""

    return compare


def nothing(**arguments: Any) -> Tensor:
    """Stand for the reference in float64, which such comparisons do not use."""
    return torch.zeros(0)


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


def _balls(min_radius: float, max_radius: float, sample_num: int, xyz: Tensor, center_xyz: Tensor) -> Tensor:
    wide = wide_of(xyz.dtype)
    return ball_query_reference(
        xyz.to(wide), center_xyz.to(wide), min_radius**2, max_radius**2, sample_num, False
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
    clouds = xyz.to(wide_of(xyz.dtype)).split(xyz_batch_cnt.tolist())
    centers = center_xyz.to(wide_of(xyz.dtype)).split(center_xyz_batch_cnt.tolist())
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
    return knn_reference(xyz.to(wide_of(xyz.dtype)), center_xyz.to(wide_of(xyz.dtype)), k)


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
    return furthest_point_sample_reference(points_xyz.to(wide_of(points_xyz.dtype)), num_points, False)


def _samples_of_table(points_dist: Tensor, num_points: int) -> Tensor:
    return furthest_point_sample_reference(points_dist.to(wide_of(points_dist.dtype)), num_points, True)


@st.composite
def _clouds(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    B, N, M, dtype = draw(st.integers(0, 3)), draw(sizes.count), draw(sizes.count), draw(sizes.value_types)
    return sizes.empty(B, N, 3, dtype=dtype), sizes.empty(B, M, 3, dtype=dtype)


def _of_centers(**settings: Any) -> Callable[[int], Problem]:
    """Return a function of a number of centers, which looks for their neighbours in small clouds."""
    return lambda n: Problem(dict(settings, xyz=rand(2, 7, 3), center_xyz=rand(2, n, 3)))


def _launches_of_balls() -> Any:
    return st.builds(
        lambda clouds, count: dict(
            min_radius=0, max_radius=1, sample_num=count, xyz=clouds[0], center_xyz=clouds[1]
        ),
        _clouds(),
        sizes.small,
    )


def _launches_of_knn() -> Any:
    return st.builds(
        lambda clouds, k: dict(k=k, xyz=clouds[0], center_xyz=clouds[1]), _clouds(), st.integers(1, 130)
    )


def _launches_of_samples() -> Any:
    return st.builds(
        lambda clouds, count: dict(points_xyz=clouds[0], num_points=count), _clouds(), sizes.small
    )


SPOILED: dict[str, Sequence[str | int]] = {"xyz": ("rank", 0, 2), "center_xyz": ("rank", "device", 0, 2)}
OPERATORS = (
    Operator(
        "ball_query",
        ball_query,
        _draw_balls,
        nothing,
        compare=same_bits(_balls),
        spoiled=SPOILED,
        of_size=(
            _of_centers(min_radius=0, max_radius=0.5, sample_num=4),
            lambda n: Problem(
                dict(min_radius=0, max_radius=0.5, sample_num=4, xyz=rand(2, n, 3), center_xyz=rand(2, 5, 3))
            ),
        ),
        launches=_launches_of_balls,
    ),
    Operator(
        "stack_ball_query",
        stack_ball_query,
        _draw_stacked_balls,
        nothing,
        compare=same_bits(_stacked_balls),
        spoiled={"xyz": ("rank", 0, 1), "center_xyz": ("rank", 0, 1), "xyz_batch_cnt": ("rank",)},
        aliases=("ball_query",),
    ),
    Operator(
        "knn",
        knn,
        _draw_knn,
        nothing,
        compare=same_bits(_nearest),
        spoiled=SPOILED,
        of_size=(
            _of_centers(k=4),
            lambda n: Problem(dict(k=4, xyz=rand(n, 7, 3), center_xyz=rand(n, 5, 3))),
        ),
        launches=_launches_of_knn,
    ),
    Operator(
        "three_nn",
        three_nn,
        _draw_three,
        nothing,
        compare=same_bits(_three, rtol=2e-7),  # torch rounds roots differently on the CPU and on CUDA
        spoiled={"target": ("rank", "type", "device", 0, 2), "source": ("rank", "type", 0, 2)},
        aliases=("knn",),
        of_size=(lambda n: Problem(dict(target=rand(2, n, 3), source=rand(2, 7, 3))),),
    ),
    Operator(
        "furthest_point_sample",
        furthest_point_sample,
        _draw_samples,
        nothing,
        compare=same_bits(_samples),
        spoiled={"points_xyz": ("rank", 2)},
        of_size=(lambda n: Problem(dict(points_xyz=rand(n, 9, 3), num_points=5)),),
        launches=_launches_of_samples,
    ),
    Operator(
        "furthest_point_sample_with_dist",
        furthest_point_sample_with_dist,
        _draw_samples_of_table,
        nothing,
        compare=same_bits(_samples_of_table),
        spoiled={"points_dist": ("rank", 1, 2)},
        aliases=("furthest_point_sample",),
        of_size=(lambda n: Problem(dict(points_dist=rand(n, 9, 9), num_points=5)),),
    ),
)
