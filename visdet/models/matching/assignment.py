"""One-to-one assignments of least total cost, which ``scipy.optimize.linear_sum_assignment`` finds on the host."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["solve_assignment", "solve_assignments"]

# This replaces NaN and infinite costs, which the solver does not accept. Such a pair is chosen last.
_INVALID_COST = 1e8


def solve_assignment(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, in ascending order, and the columns of the assignment of least total cost.

    Args:
        cost: a matrix [Q, N]. Costs that are not finite count as 1e8.
    """
    # scipy.optimize is slow to import, and it is not needed before the first matching.
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(np.where(np.isfinite(cost), cost, _INVALID_COST))


def solve_assignments(costs: Sequence[Tensor]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Solve the assignment of each matrix of each stack. All matrices are copied to the host at once.

    Args:
        costs: stacks [D, Q, N_i] of cost matrices.

    Returns:
        result[i][d], the result of :func:`solve_assignment` for matrix d of stack i.
    """
    if not costs:
        return []
    # The solver runs on the host. This copy is the only point where a loss waits for the device.
    flat = torch.cat([cost.detach().flatten() for cost in costs]).float().cpu().numpy()
    ends = np.cumsum([cost.numel() for cost in costs])[:-1]
    return [
        [solve_assignment(matrix) for matrix in part.reshape(cost.shape)]
        for part, cost in zip(np.split(flat, ends), costs, strict=True)
    ]
