"""A weighted sum of 3-D Gaussians at many points, without the points x Gaussians matrix."""

import torch
from torch import Tensor

from . import _registration
from ._arguments import widened
from ._declared import declared
from .mahalanobis_distance import mahalanobis_distance_reference
from .tracing import recorded_as_one

__all__ = ["gaussian_field", "gaussian_field_reference"]

_ORDER_BITS = 10  # the number of bits of each coordinate in the sorting along a Z-order curve


@declared(points="floating", means="real", cholesky="real", weights="real", tolerance="number, at least 0")
def gaussian_field(
    points: Tensor,  # [B, 3]
    means: Tensor,  # [N, 3]
    cholesky: Tensor,  # [N, 3, 3] lower
    weights: Tensor,  # [N]
    tolerance: float = 0.0,
) -> Tensor:  # [B]
    """Return ``field[b] = sum_n weights[n] * exp(-mahalanobis_distance[b, n] / 2)`` in O(B + N) memory.

    Args:
        points: [B, 3]. Positions in any unit, float64, float32, float16 or bfloat16.
        means: [N, 3]. The Gaussians' centres in the same unit, of any floating-point type. Means, factors and weights
            are converted to the type of the computation.
        cholesky: [N, 3, 3]. The lower factors of the covariances; what stands above the diagonal is not read. On the
            CPU a diagonal that is not positive is an error. On CUDA, where finding it would synchronise, the field is
            NaN. A Gaussian with a diagonal below 1e-18 (1e-150 in float64) adds nothing beside its plane.
        weights: [N]. Any numbers.
        tolerance: 0 adds every pair. Above 0, a Gaussian may be left out at points where its term is below
            ``tolerance / N`` in magnitude, so that no value of the field is off by more than ``tolerance``. Points and
            Gaussians are then sorted in space, and compact Gaussians cost only where they are. The gradients are those
            of the terms that were added.

    Returns:
        [B]. The field, summed in float32 (float64 for float64 points), in the type of ``points``. A NaN point has a NaN
        value. A term whose distance is infinite, such as that of a Gaussian with an infinite mean, is 0 and has no
        gradient.

    It is differentiable once with respect to everything but ``tolerance``, all six entries of each factor included
    (zero above the diagonal). It is deterministic, forward and backward.

    Raises:
        RuntimeError: A shape, device or diagonal does not fit. The message names the argument.
        ValueError: A type does not fit, or ``tolerance`` is negative or not finite. The message names the argument.
        NotBuiltError: The library for the device is not built.

    Source: The density of a Gaussian mixture; the fused kernels are visdet's own.
    """
    given = points
    points, means, cholesky, weights = (widened(one, given) for one in (points, means, cholesky, weights))
    point_order = gaussian_order = points.new_empty(0, dtype=torch.int64)
    # On CUDA only the kernels of float32 leave out pairs. Those of the CPU take the points as they come.
    on_cpu = points.device.type == "cpu"
    are_positions = all(one.dim() == 2 and one.shape[1] == 3 for one in (points, means))
    if tolerance > 0 and are_positions and (on_cpu or points.dtype == torch.float32):
        gaussian_order = space_order(means.detach())
        if not on_cpu:
            point_order = space_order(points.detach())
    field = _gaussian_field(points, means, cholesky, weights, point_order, gaussian_order, tolerance)
    return field.to(given)


def gaussian_field_reference(points: Tensor, means: Tensor, cholesky: Tensor, weights: Tensor) -> Tensor:
    """Return what ``gaussian_field`` returns, in plain torch: the definition kernels are tested against."""
    return torch.exp(-0.5 * mahalanobis_distance_reference(points, means, cholesky)) @ weights


def _order_in_space(positions: Tensor) -> Tensor:
    """Return the permutation of positions [M, 3] along a Z-order curve through their box."""
    if positions.shape[0] == 0:
        return positions.new_empty(0, dtype=torch.int64)
    positions = positions.nan_to_num(0.0, 0.0, 0.0)
    low, high = positions.amin(0), positions.amax(0)
    most = 2**_ORDER_BITS - 1
    cells = (positions - low) / (high - low).clamp(min=1e-30) * most
    cells = cells.nan_to_num(0.0).clamp(0, most).to(torch.int64)
    code = torch.zeros_like(cells[:, 0])
    for bit in range(_ORDER_BITS):
        for axis in range(3):
            code |= (cells[:, axis] >> bit & 1) << (3 * bit + axis)
    return code.argsort(stable=True)


space_order = recorded_as_one(
    _order_in_space,
    "Tensor positions",
    leaves=0,
    fake=lambda positions: positions.new_empty(positions.shape[0], dtype=torch.int64),
)


_gaussian_field = _registration.differentiable(
    "gaussian_field",
    "points [B]",
    layouts={"points": "[B, 3]"},
    elsewhere=lambda *given: gaussian_field_reference(*given[:4]),
)
