"""Furthest point sampling of point clouds."""

import torch
from torch import Tensor

from . import _registration
from ._arguments import check_that, constant, numbers_to
from ._declared import declared

__all__ = ["furthest_point_sample", "furthest_point_sample_with_dist"]


@declared(points_xyz="real [B, N, 3]", num_points="integer, at least 0")
def furthest_point_sample(
    points_xyz: Tensor,  # [B, N, 3]
    num_points: int,
) -> Tensor:  # [B, num_points] int32
    """Return samples of each cloud: its first point, and then always the point that is furthest from all samples.

    Args:
        points_xyz: [B, N, 3]. The points. 16-bit types are computed in float32.
        num_points: The number of samples. Beyond the number of points, samples are repeated.

    Returns:
        [B, num_points] int32. The indices. Of points at the same distance the lower index is taken. Distances that
        are NaN do not count, and none is larger than 1e5.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape or ``num_points`` does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    return _sampled("furthest_point_sample", points_xyz, num_points, False)


@declared(points_dist="real [B, N, N]", num_points="integer, at least 0")
def furthest_point_sample_with_dist(
    points_dist: Tensor,  # [B, N, N]
    num_points: int,
) -> Tensor:  # [B, num_points] int32
    """Return what ``furthest_point_sample`` returns, given the distance of each pair of points.

    Args:
        points_dist: [B, N, N]. The distances, of any kind.
        num_points: As of ``furthest_point_sample``.

    Returns:
        [B, num_points] int32. As from ``furthest_point_sample``.

    It is not differentiable. It is deterministic.

    Raises:
        ValueError: A shape or ``num_points`` does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    return _sampled("furthest_point_sample_with_dist", points_dist, num_points, True)


def _sampled(op: str, points: Tensor, num_points: int, is_table: bool) -> Tensor:
    check_that(num_points == 0 or points.shape[1] > 0, op, "num_points", "be 0 for 0 points", num_points)
    return _furthest_point_sample(constant(points, points), num_points, is_table)


def furthest_point_sample_reference(points: Tensor, num_points: int, is_table: bool) -> Tensor:
    """Return the samples of points [B, N, 3] or, with ``is_table``, of distances [B, N, N], in plain torch."""
    cloud = numbers_to(len(points), points)
    samples = cloud.new_zeros(num_points, len(points))
    nearest = points.new_full(points.shape[:2], 1e10)
    for i in range(1, num_points):
        row = points[cloud, samples[i - 1]]
        if not is_table:
            x, y, z = (points - row[:, None]).square_().unbind(2)
            row = x + y + z
        torch.fmin(nearest, row, out=nearest)
        torch.argmax(nearest, 1, out=samples[i])
    return samples.T.int()


_furthest_point_sample = _registration.without_gradient(
    "furthest_point_sample",
    "points [B, num_points] int32",
    furthest_point_sample_reference,
    points="[B, N, 3]",
)
