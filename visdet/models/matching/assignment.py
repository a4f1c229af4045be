"""One-to-one assignments of least total cost, which ``scipy.optimize.linear_sum_assignment`` finds on the host."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["for_solver", "solve_assignment", "solve_padded"]

# This replaces NaN and infinite costs, which the solver does not accept. Such a pair is chosen last.
_INVALID_COST = 1e8


def for_solver(costs: Tensor) -> Tensor:
    """Return costs [..., Q, N] in the form in which the solver is fastest: [..., N, Q], float64 and contiguous.

    Costs that are not finite are replaced by 1e8. All work runs on the device.
    """
    finite = costs.detach().nan_to_num(_INVALID_COST, _INVALID_COST, _INVALID_COST)
    return finite.transpose(-1, -2).to(torch.float64, memory_format=torch.contiguous_format)


def solve_padded(costs: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the target of each prediction, [..., B, Q] int64 in 0..N-1, or N for predictions without a target.

    Args:
        costs: [..., B, N, Q], a result of :func:`for_solver`, on the host.
        counts: number of targets of each of the B samples. Further rows are padding.
    """
    # scipy.optimize is slow to import, and it is not needed before the first matching.
    from scipy.optimize import linear_sum_assignment

    num_padded, num_predictions = costs.shape[-2:]
    targets = np.full((*costs.shape[:-2], num_predictions), num_padded, dtype=np.int64)
    for position in np.ndindex(costs.shape[:-2]):
        chosen, predictions = linear_sum_assignment(costs[position][: counts[position[-1]]])
        targets[position][predictions] = chosen
    return targets


def solve_assignment(cost: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, in ascending order, and the columns of the assignment of least total cost.

    Args:
        cost: [Q, N]. Costs that are not finite count as 1e8.
    """
    index = solve_padded(for_solver(cost)[None].cpu().numpy(), [cost.shape[1]])[0]
    rows = np.flatnonzero(index < cost.shape[1])
    return rows, index[rows]
