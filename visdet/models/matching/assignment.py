"""One-to-one assignments at least total cost, solved on the host by ``scipy.optimize.linear_sum_assignment``."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["solve_assignment", "solve_assignments"]

_INVALID_COST = 1e8  # of a pair with a NaN or infinite cost: chosen last, and the solver stays well-defined


def solve_assignment(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, ascending, and columns of least total cost of a matrix [Q, N]; one that is not finite is 1e8."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and a first matching is soon enough

    return linear_sum_assignment(np.where(np.isfinite(cost), cost, _INVALID_COST))


def solve_assignments(costs: Sequence[Tensor]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Return what :func:`solve_assignment` does for each matrix of each stack, all moved to the host at once.

    Args:
        costs: stacks [D, Q, N_i] of cost matrices.

    Returns:
        result[i][d].
    """
    if not costs:
        return []
    # The solver runs on the host: this copy is the one point where a loss waits for the device.
    flat = torch.cat([cost.detach().flatten() for cost in costs]).float().cpu().numpy()
    ends = np.cumsum([cost.numel() for cost in costs])[:-1]
    return [
        [solve_assignment(matrix) for matrix in part.reshape(cost.shape)]
        for part, cost in zip(np.split(flat, ends), costs, strict=True)
    ]
