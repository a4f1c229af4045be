"""Squared Mahalanobis distances between 3-D points and Gaussians."""

import torch
from torch import Tensor

from . import _registration
from ._arguments import widened
from ._declared import declared

__all__ = ["mahalanobis_distance", "mahalanobis_distance_reference"]


@declared(points="floating", means="real", cholesky="real")
def mahalanobis_distance(
    points: Tensor,  # [B, 3]
    means: Tensor,  # [N, 3]
    cholesky: Tensor,  # [N, 3, 3] lower
) -> Tensor:  # [B, N]
    """Return ``distance[b, n] = |v|^2`` with ``cholesky[n] @ v = points[b] - means[n]``: squared, nothing added.

    Args:
        points: [B, 3]. Positions in any unit, float64, float32, float16 or bfloat16.
        means: [N, 3]. The Gaussians' centres in the same unit, of any floating-point type. Means and factors are
            converted to the type of the computation.
        cholesky: [N, 3, 3]. The lower factors of the covariances; what stands above the diagonal is not read. On the
            CPU a diagonal that is not positive is an error. On CUDA, where finding it would synchronise, that
            Gaussian's distances are NaN.

    Returns:
        [B, N]. The distances, computed in float32 (float64 for float64 points), in the type of ``points``. Distances of
        a NaN point, or of a Gaussian with a NaN, are NaN. A distance is infinite, and has no gradient, where the point
        or the mean is infinite, or the arithmetic overflows.

    It is differentiable once with respect to everything, all six entries of each factor included (zero above the
    diagonal). It is deterministic.

    Raises:
        RuntimeError: A shape, device or diagonal does not fit. The message names the argument.
        ValueError: A type does not fit. The message names the argument.
        NotBuiltError: The library for the device is not built.

    Source: The triangular solve of a Gaussian's exponent; the fused kernels are visdet's own.
    """
    given = widened(points, points), widened(means, points), widened(cholesky, points)
    return _mahalanobis_distance(*given).to(points)


def mahalanobis_distance_reference(points: Tensor, means: Tensor, cholesky: Tensor) -> Tensor:
    """Return what ``mahalanobis_distance`` returns, in plain torch: the definition kernels are tested against."""
    difference = points[:, None] - means  # [B, N, 3]
    with torch.no_grad():
        distance = _solved(difference, cholesky).square().sum(-1)
        holds_nan = points.isnan().any(-1)[:, None] | (means + cholesky.tril().sum(-1)).isnan().any(-1)
        is_far = ~distance.isfinite() & ~holds_nan
    # Other numbers take the place of these pairs, because infinity would have a gradient of NaN.
    factors = torch.where(is_far[..., None, None], torch.eye(3).to(cholesky), cholesky)  # [B, N, 3, 3]
    square = _solved(torch.where(is_far[..., None], 0, difference), factors).square().sum(-1)
    return torch.where(is_far, torch.inf, square)


def _solved(difference: Tensor, cholesky: Tensor) -> Tensor:
    """Return v [B, N, 3] with cholesky @ v = difference, by forward substitution."""
    diagonal = cholesky.diagonal(dim1=-2, dim2=-1)
    rows, (x, y, z) = cholesky.tril(-1) / diagonal[..., None], (difference / diagonal).unbind(-1)
    y = y - rows[..., 1, 0] * x
    z = z - rows[..., 2, 0] * x - rows[..., 2, 1] * y
    return torch.stack([x, y, z], -1)


_mahalanobis_distance = _registration.differentiable(
    "mahalanobis_distance",
    "points [B, N]",
    layouts={"points": "[B, 3]", "means": "[N, 3]"},
    elsewhere=mahalanobis_distance_reference,
)
