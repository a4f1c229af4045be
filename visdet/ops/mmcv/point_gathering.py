"""Features of chosen points: grouping, gathering, interpolation, and assembly by scores."""

import torch
from torch import Tensor

from .._arguments import empty_sum, is_index, numbers_to, widened
from .._declared import declared
from ..gather_points import gather_gradient, gathered, stacked_indices
from ..point_neighbours import sizes_of

__all__ = [
    "assign_score_withk",
    "gather_points",
    "group_points",
    "stack_group_gradient",
    "stack_group_points",
    "three_interpolate",
]


@declared(features="any [B, C, N]", indices="integers [B, M, K]")
def group_points(
    features: Tensor,  # [B, C, N]
    indices: Tensor,  # [B, M, K]
) -> Tensor:  # [B, C, M, K]
    """Return the features of the points of each group.

    Args:
        features: [B, C, N]. The features of the points.
        indices: [B, M, K]. Indices of points, such as ``ball_query`` gives.

    Returns:
        [B, C, M, K]. The features.

    It is differentiable with respect to the features. Their gradient is summed in any order on CUDA, unless it must be
    deterministic.

    Raises:
        ValueError: A shape does not fit. The message names the argument.
        RuntimeError: An index is not one of a point.

    Source: The signature is mmcv's.
    """
    grouped = gathered(_wide(features), indices.flatten(1)[..., None])
    return grouped.to(features).unflatten(2, indices.shape[1:])


def _wide(features: Tensor) -> Tensor:
    """Return features in float32 if they are 16-bit, because the gradient of a point in many groups is a sum."""
    return widened(features, features) if features.is_floating_point() else features


@declared(features="any [B, C, N]", indices="integers [B, M]")
def gather_points(
    features: Tensor,  # [B, C, N]
    indices: Tensor,  # [B, M]
) -> Tensor:  # [B, C, M]
    """Return the features of chosen points.

    Args:
        features: [B, C, N]. The features of the points.
        indices: [B, M]. Indices of points, such as ``furthest_point_sample`` gives.

    Returns:
        [B, C, M]. The features.

    It is differentiable with respect to the features. Their gradient is summed in any order on CUDA, unless it must be
    deterministic.

    Raises:
        ValueError: A shape does not fit. The message names the argument.
        RuntimeError: An index is not one of a point.

    Source: The signature is mmcv's.
    """
    return group_points(features, indices[..., None]).squeeze(3)


@declared(
    features="any [N, C]",
    features_batch_cnt="integers [B]",
    indices="integers [M, K]",
    indices_batch_cnt="integers [B]",
)
def stack_group_points(
    features: Tensor,  # [N, C]
    features_batch_cnt: Tensor,  # [B]
    indices: Tensor,  # [M, K]
    indices_batch_cnt: Tensor,  # [B]
) -> Tensor:  # [M, C, K]
    """Return what ``group_points`` returns of clouds of different sizes, which stand one after the other.

    Args:
        features: [N, C]. The features of the points of all clouds.
        features_batch_cnt: [B]. The number of points of each cloud.
        indices: [M, K]. Indices within the cloud, such as ``stack_ball_query`` gives.
        indices_batch_cnt: [B]. The number of groups of each cloud.

    Returns:
        [M, C, K]. The features. They are 0 where an index is not one of a point of the cloud.

    It is differentiable with respect to the features. Their gradient is summed in any order on CUDA, unless it must be
    deterministic.

    Raises:
        ValueError: A shape or a sum of numbers does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    index = _stacked("stack_group_points", features, features_batch_cnt, indices, indices_batch_cnt)
    return gathered(_wide(features), index, zeros_outside=True).to(features)


def stack_group_gradient(
    grad_output: Tensor,  # [M, C, K]
    features: Tensor,  # [N, C], of which only the shape counts
    features_batch_cnt: Tensor,  # [B]
    indices: Tensor,  # [M, K]
    indices_batch_cnt: Tensor,  # [B]
) -> Tensor:  # [N, C]
    """Return the gradient of ``stack_group_points`` with respect to the features, given that of its result."""
    index = _stacked("stack_group_gradient", features, features_batch_cnt, indices, indices_batch_cnt)
    wide = widened(grad_output, grad_output)
    return gather_gradient(wide, features.shape, index)


def _stacked(
    op: str, features: Tensor, features_batch_cnt: Tensor, indices: Tensor, indices_batch_cnt: Tensor
) -> Tensor:  # [M, K, 1]
    """Return the indices among the points of all clouds, and -1 where an index is not one of a point of its cloud."""
    sizes_of(op, "features", features, features_batch_cnt)
    sizes_of(op, "indices", indices, indices_batch_cnt)
    return stacked_indices(indices, features_batch_cnt.int(), indices_batch_cnt.int())[..., None]


@declared(features="floating [B, C, M]", indices="integers [B, N, 3]", weight="floating [B, N, 3]")
def three_interpolate(
    features: Tensor,  # [B, C, M]
    indices: Tensor,  # [B, N, 3]
    weight: Tensor,  # [B, N, 3]
) -> Tensor:  # [B, C, N]
    """Return the weighted sum of the features of three points, for each of N points.

    Args:
        features: [B, C, M]. The features of the points that ``three_nn`` was given as ``source``.
        indices: [B, N, 3]. Their indices.
        weight: [B, N, 3]. Their weights.

    Returns:
        [B, C, N]. The sums in the type of the features. 16-bit types are summed in float32.

    It is differentiable with respect to the features and the weights. (mmcv's weights have no gradient.) The gradient
    of the features is summed in any order on CUDA, unless it must be deterministic.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.
        RuntimeError: An index is not one of a point.

    Source: The signature is mmcv's.
    """
    # The gradient of a point is summed before it is rounded.
    return gathered(widened(features, features), indices, widened(weight, features)).to(features)


@declared(
    point_features="floating [B, N, M, C]",
    center_features="floating [B, N, M, C]",
    scores="floating [B, P, K, M]",
    knn_idx="integers [B, P, K]",
)
def assign_score_withk(
    scores: Tensor,  # [B, P, K, M]
    point_features: Tensor,  # [B, N, M, C]
    center_features: Tensor,  # [B, N, M, C]
    knn_idx: Tensor,  # [B, P, K]
) -> Tensor:  # [B, C, P, K]
    """Return the features of each neighbour less those of the center, summed over a bank of M weights by scores.

    Args:
        scores: [B, P, K, M]. The scores of each neighbour for each weight of the bank.
        point_features: [B, N, M, C]. The features of the points by each weight of the bank.
        center_features: [B, N, M, C]. The same as features of centers.
        knn_idx: [B, P, K]. The neighbours of each of P points. The first one is the center. Neighbours that are not in
            0..N-1 give 0, and so do those of a center that is not.

    Returns:
        [B, C, P, K]. The sums. 16-bit types are summed in float32.

    It is differentiable with respect to the scores and the features.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.

    Source: Paper "PAConv" (Xu et al.). The argument order is mmcv's.
    """
    (B, N, _, C), (P, K) = point_features.shape, scores.shape[1:3]
    if N == 0 or K == 0:
        return point_features.new_zeros(B, C, P, K) + empty_sum(point_features, scores)
    cloud = numbers_to(B, knn_idx)[:, None, None]
    is_inside = is_index(knn_idx, N)
    is_inside = (is_inside & is_inside[..., :1])[..., None, None]
    index = knn_idx.long().clamp(0, N - 1)
    # [B, P, K, M, C]. The gradient of a point in many groups is a sum, which needs float32.
    points, centers, factors = (
        widened(one, point_features) for one in (point_features, center_features, scores[..., None])
    )
    difference = points[cloud, index] - centers[cloud, index[..., :1]]
    # What is selected before the product has a gradient of 0 and not of 0 * NaN.
    terms = torch.where(is_inside, factors, 0) * torch.where(is_inside, difference, 0)
    return terms.sum(3).permute(0, 3, 1, 2).to(point_features)
