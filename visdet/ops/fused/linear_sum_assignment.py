"""One-to-one assignments of least total cost on a GPU, many problems at a time."""

import torch
from torch import Tensor

from ..tracing import is_traced
from ._gpu_rows import is_built

__all__ = ["linear_sum_assignment", "solves_assignments_on"]


def linear_sum_assignment(
    costs: Tensor,  # [..., B, N, Q]
    counts: Tensor,  # [B]
) -> Tensor:  # [..., B, Q]
    """Return the rows that are assigned to the columns of matrices, such that the total cost of each is least.

    The result is that of ``scipy.optimize.linear_sum_assignment``, also where several assignments cost the same. The
    host does not wait for it. There is a kernel for CUDA alone: on the CPU, call scipy.

    Args:
        costs: The matrices, float64. A cost may be any number but NaN and infinity. With these, the assignment is one
            to one, but its cost may not be the least.
        counts: The number of rows of each sample that take part, int64. The others are padding.

    Returns:
        For each column, its row, int64 in 0..N-1, or N if it has none. As many columns have one as the lesser of the
        sample's count and Q says.

    It is not differentiable. It is deterministic.

    Raises:
        RuntimeError: A shape, type or device does not fit; the message names the argument.

    Source: Crouse, On implementing 2D rectangular assignment algorithms, IEEE Transactions on Aerospace and Electronic
    Systems 52(4), 2016.
    """
    if not solves_assignments_on(costs):
        raise RuntimeError(
            "linear_sum_assignment: costs must be on a GPU for which the CUDA library is built, got a tensor on "
            f"{costs.device}; scipy.optimize.linear_sum_assignment solves assignments on the CPU"
        )
    return torch.ops.visdet.linear_sum_assignment.default(costs.detach(), counts)


def solves_assignments_on(costs: Tensor) -> bool:
    """Return whether ``linear_sum_assignment`` has a kernel for the device of ``costs``."""
    return costs.is_cuda and not is_traced() and is_built("linear_sum_assignment")
