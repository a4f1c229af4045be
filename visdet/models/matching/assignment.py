"""One-to-one assignments of least total cost, which scipy finds on the CPU and a kernel of its own on a GPU."""

from collections.abc import Sequence

import numpy as np
import torch
from mmengine import dist
from torch import Tensor

from visdet.ops.fused import linear_sum_assignment, solves_assignments_on

from ..transfer import to_device


def mean_count(counts: Tensor) -> Tensor:
    """Return the mean of each count over all processes, but at least 1. In a distributed run, it is float32."""
    if dist.get_world_size() > 1:
        counts = counts.to(torch.float32, copy=True)
        dist.all_reduce(counts, op="mean")
    return counts.clamp(min=1.0)


# This replaces NaN and infinite costs, which the solver does not accept. Such a pair is chosen last.
_INVALID_COST = 1e8


def for_solver(costs: Tensor) -> Tensor:
    """Return costs [..., Q, N] in the form in which the solver is fastest: [..., N, Q], float64 and contiguous.

    Costs that are not finite are replaced by 1e8. All work runs on the device.
    """
    finite = costs.detach().nan_to_num(_INVALID_COST, _INVALID_COST, _INVALID_COST)
    return finite.transpose(-1, -2).to(torch.float64, memory_format=torch.contiguous_format)


def solve_padded(costs: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
    """Return the target of each prediction, [..., B, Q] int64 in 0..N-1, or N for predictions without a target.

    On a GPU, the host does not wait for the result. Elsewhere, scipy solves the problems.

    Args:
        costs: [..., B, N, Q], a result of :func:`for_solver`.
        counts: number of targets of each of the B samples. Further rows are padding.
    """
    if solves_assignments_on(costs):
        return linear_sum_assignment(costs, to_device(counts, costs.device, torch.int64))
    # scipy.optimize is slow to import, and it is not needed before the first matching.
    from scipy import optimize

    on_host = costs.numpy(force=True)
    lengths = torch.as_tensor(counts).tolist()
    *problems, num_padded, num_predictions = on_host.shape
    targets = np.full((*problems, num_predictions), num_padded, dtype=np.int64)
    for position in np.ndindex(*problems):
        chosen, predictions = optimize.linear_sum_assignment(on_host[position][: lengths[position[-1]]])
        targets[position][predictions] = chosen
    return to_device(targets, costs.device)
