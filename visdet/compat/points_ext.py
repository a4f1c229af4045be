"""The functions of extensions for points, by the name of the extension.

They are those of ``mmdet3d.ops`` up to mmdet3d 0.18 (``…_ext``), of ``pcdet.ops`` (``…_cuda``), of
``pointnet2_ops._ext`` and ``chamfer`` (SurroundOcc). ``FUNCTIONS`` also has those of ``boxes_ext`` and ``views_ext``.
``visdet.compat.extensions`` makes them importable, also within a package. A name that an extension has and this module
has not is that of a function that raises a NotImplementedError.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.mmcv import point_gathering, point_sets

from . import _mmcv_functions as own
from . import boxes_ext, mmcv_ext_voxels, views_ext  # noqa: F401  (declare the other extensions)
from ._served import SERVED, Gradient, GradOutput, Result, computes, gradients_of, serves

_ball_query = functools.partial(ops.ball_query, 0)  # from the radius 0


def _interpolate_stacked(features: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
    return (features[idx.long()] * weight[..., None]).sum(1)


def _gradient(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of the gradient of an operator that is linear in its features, which it is not given."""

    def gradient(grad: Tensor, index: Tensor, *weight_and_count: Any) -> Tensor:
        *weight, count = weight_and_count
        zeros = grad.new_zeros(*grad.shape[:2], count)

        def of_features(features: Tensor) -> Tensor:
            return operator(features, index, *weight)

        return gradients_of("pointnet2_ops._ext", of_features, [zeros], [grad])[0]

    return gradient


@serves(ops.assign_score_withk, "assign_score_withk_ext.assign_score_withk_forward_wrapper")
def assign_score_withk_forward_wrapper(
    b: object,
    n: object,
    m: object,
    count: object,
    k: object,
    dim: object,
    aggregate: object,
    point_features: Tensor,
    center_features: Tensor,
    scores: Tensor,
    knn_idx: Tensor,
    output: Result,
) -> None: ...


@serves(
    ops.assign_score_withk,
    "assign_score_withk_ext.assign_score_withk_backward_wrapper",
    grad_points="point_features",
    grad_centers="center_features",
    grad_scores="scores",
)
def assign_score_withk_backward_wrapper(
    b: object,
    n: object,
    m: object,
    count: object,
    k: object,
    dim: object,
    aggregate: object,
    grad_out: GradOutput,
    point_features: Tensor,
    center_features: Tensor,
    scores: Tensor,
    knn_idx: Tensor,
    grad_points: Gradient,
    grad_centers: Gradient,
    grad_scores: Gradient,
) -> None: ...


@serves(ops.ball_query, "ball_query_ext.ball_query_wrapper")
def ball_query_wrapper(
    b: object,
    n: object,
    m: object,
    min_radius: float,
    max_radius: float,
    sample_num: int,
    center_xyz: Tensor,
    xyz: Tensor,
    idx: Result,
) -> None: ...


@serves(
    ops.furthest_point_sample,
    "furthest_point_sample_ext.furthest_point_sampling_wrapper",
    "pointnet2_batch_cuda.farthest_point_sampling_wrapper",
    "pointnet2_stack_cuda.farthest_point_sampling_wrapper",
)
def furthest_point_sampling_wrapper(
    b: object, n: object, num_points: int, points_xyz: Tensor, temp: object, idx: Result
) -> None: ...


@serves(
    ops.furthest_point_sample_with_dist, "furthest_point_sample_ext.furthest_point_sampling_with_dist_wrapper"
)
def furthest_point_sampling_with_dist_wrapper(
    b: object, n: object, num_points: int, points_dist: Tensor, temp: object, idx: Result
) -> None: ...


@serves(
    ops.gather_points, "gather_points_ext.gather_points_wrapper", "pointnet2_batch_cuda.gather_points_wrapper"
)
def gather_points_wrapper(
    b: object, c: object, n: object, m: object, features: Tensor, indices: Tensor, out: Result
) -> None: ...


@serves(
    ops.gather_points,
    "gather_points_ext.gather_points_grad_wrapper",
    "pointnet2_batch_cuda.gather_points_grad_wrapper",
    index="indices",
    points="features",
)
def gather_points_grad_wrapper(
    b: object, c: object, n: object, m: object, grad: GradOutput, index: Tensor, points: Gradient
) -> None: ...


@serves(ops.group_points, "group_points_ext.forward", "pointnet2_batch_cuda.group_points_wrapper")
def group_points_forward(
    b: object,
    c: object,
    n: object,
    m: object,
    nsample: object,
    features: Tensor,
    indices: Tensor,
    out: Result,
) -> None: ...


@serves(
    ops.group_points,
    "group_points_ext.backward",
    "pointnet2_batch_cuda.group_points_grad_wrapper",
    index="indices",
    points="features",
)
def group_points_backward(
    b: object,
    c: object,
    n: object,
    m: object,
    nsample: object,
    grad: GradOutput,
    index: Tensor,
    points: Gradient,
) -> None: ...


@serves(own.three_nn, "interpolate_ext.three_nn_wrapper", "pointnet2_batch_cuda.three_nn_wrapper")
def three_nn_wrapper(
    b: object, n: object, m: object, unknown: Tensor, known: Tensor, dist2: Result, idx: Result
) -> None: ...


@serves(
    ops.three_interpolate,
    "interpolate_ext.three_interpolate_wrapper",
    "pointnet2_batch_cuda.three_interpolate_wrapper",
)
def three_interpolate_wrapper(
    b: object, c: object, m: object, n: object, features: Tensor, indices: Tensor, weight: Tensor, out: Result
) -> None: ...


@serves(
    ops.three_interpolate,
    "interpolate_ext.three_interpolate_grad_wrapper",
    "pointnet2_batch_cuda.three_interpolate_grad_wrapper",
    index="indices",
    points="features",
)
def three_interpolate_grad_wrapper(
    b: object,
    c: object,
    n: object,
    m: object,
    grad: GradOutput,
    index: Tensor,
    weight: Tensor,
    points: Gradient,
) -> None: ...


@serves(own.knn, "knn_ext.knn_wrapper")
def knn_wrapper(
    b: object, n: object, m: object, k: int, xyz: Tensor, center_xyz: Tensor, idx: Result, dist2: Result
) -> None: ...


@serves(_ball_query, "pointnet2_batch_cuda.ball_query_wrapper")
def batch_ball_query_wrapper(
    b: object,
    n: object,
    m: object,
    max_radius: float,
    sample_num: int,
    center_xyz: Tensor,
    xyz: Tensor,
    idx: Result,
) -> None: ...


@serves(ops.stack_ball_query, "pointnet2_stack_cuda.ball_query_wrapper")
def stack_ball_query_wrapper(
    b: object,
    m: object,
    max_radius: float,
    sample_num: int,
    center_xyz: Tensor,
    center_xyz_batch_cnt: Tensor,
    xyz: Tensor,
    xyz_batch_cnt: Tensor,
    idx: Result,
) -> None: ...


@computes("pointnet2_stack_cuda.stack_farthest_point_sampling_wrapper")
def _sample_stacked(points: Tensor, temp: object, counts: Tensor, idx: Result, sampled: Tensor) -> Tensor:
    """Return the indices, among all points, of the points that are sampled of each cloud."""
    starts = (counts.cumsum(0) - counts).tolist()
    found = [
        ops.furthest_point_sample(cloud[None], count)[0] + start
        for cloud, count, start in zip(points.split(counts.tolist()), sampled.tolist(), starts, strict=True)
    ]
    return torch.cat(found)


@serves(ops.stack_group_points, "pointnet2_stack_cuda.group_points_wrapper")
def group_points_wrapper(
    b: object,
    m: object,
    c: object,
    nsample: object,
    features: Tensor,
    features_batch_cnt: Tensor,
    indices: Tensor,
    indices_batch_cnt: Tensor,
    out: Result,
) -> None: ...


@serves(point_gathering.stack_group_gradient, "pointnet2_stack_cuda.group_points_grad_wrapper")
def group_points_grad_wrapper(
    b: object,
    m: object,
    c: object,
    n: object,
    nsample: object,
    grad_output: Tensor,
    indices: Tensor,
    indices_batch_cnt: Tensor,
    features_batch_cnt: Tensor,
    features: Result,
) -> None: ...


@computes("pointnet2_stack_cuda.three_nn_wrapper")
def _three_of_stacked(
    unknown: Tensor, unknown_counts: Tensor, known: Tensor, known_counts: Tensor, dist2: Result, idx: Result
) -> tuple[Tensor, Tensor]:
    """Return the squared distances of the three nearest points in the same cloud, and their indices among all."""
    starts = (known_counts.cumsum(0) - known_counts).tolist()
    clouds = zip(
        unknown.split(unknown_counts.tolist()), known.split(known_counts.tolist()), starts, strict=True
    )
    found = [(own.three_nn(one[None], other[None]), start) for one, other, start in clouds]
    return torch.cat([pair[0][0] for pair, _ in found]), torch.cat(
        [pair[1][0] + start for pair, start in found]
    )


@serves(_interpolate_stacked, "pointnet2_stack_cuda.three_interpolate_wrapper")
def stack_three_interpolate_wrapper(features: Tensor, idx: Tensor, weight: Tensor, out: Result) -> None: ...


@serves(_interpolate_stacked, "pointnet2_stack_cuda.three_interpolate_grad_wrapper", grad_features="features")
def stack_three_interpolate_grad_wrapper(
    grad_out: GradOutput, idx: Tensor, weight: Tensor, grad_features: Gradient
) -> None: ...


@serves(_ball_query, "pointnet2_ops._ext.ball_query")
def ball_query(center_xyz: Tensor, xyz: Tensor, max_radius: float, sample_num: int) -> Any: ...


@serves(ops.furthest_point_sample, "pointnet2_ops._ext.furthest_point_sampling")
def furthest_point_sampling(points_xyz: Tensor, num_points: int) -> Any: ...


@serves(ops.gather_points, "pointnet2_ops._ext.gather_points")
def gather_points(features: Tensor, indices: Tensor) -> Any: ...


@serves(ops.group_points, "pointnet2_ops._ext.group_points")
def group_points(features: Tensor, indices: Tensor) -> Any: ...


@serves(ops.three_interpolate, "pointnet2_ops._ext.three_interpolate")
def three_interpolate(features: Tensor, indices: Tensor, weight: Tensor) -> Any: ...


@serves(own.three_nn, "pointnet2_ops._ext.three_nn")
def three_nn(unknown: Tensor, known: Tensor) -> Any: ...


@computes("ingroup_inds_cuda.forward")
def _places_in_groups(group_inds: Tensor, out_inds: Result) -> Tensor:
    """Return how many equal numbers stand before each number."""
    ordered, order = group_inds.sort(stable=True)
    places = torch.arange(len(order), device=order.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(order).scatter_(0, order, places)


@computes("chamfer.forward")
def _chamfer(xyz1: Tensor, xyz2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index1, distance1 = ops.knn(1, xyz2, xyz1)
    index2, distance2 = ops.knn(1, xyz1, xyz2)
    return distance1[..., 0], distance2[..., 0], index1[..., 0], index2[..., 0]


@serves(
    point_sets.squared_distances,
    "chamfer.backward",
    returns=(
        "xyz1",
        "xyz2",
    ),
    idx1="nearest1",
    idx2="nearest2",
)
def chamfer_backward(
    xyz1: Tensor, xyz2: Tensor, idx1: Tensor, idx2: Tensor, grad_dist1: GradOutput, grad_dist2: GradOutput
) -> Any: ...


SERVED["pointnet2_ops._ext"] |= {
    "gather_points_grad": _gradient(ops.gather_points),
    "group_points_grad": _gradient(ops.group_points),
    "three_interpolate_grad": _gradient(ops.three_interpolate),
}

FUNCTIONS = SERVED
