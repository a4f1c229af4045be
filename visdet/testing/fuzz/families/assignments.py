"""Problems of linear_sum_assignment."""

import itertools
from typing import Any

import torch
from torch import Tensor

from visdet.ops.fused import linear_sum_assignment

from ..problem import Draw, Family, Problem

__all__ = ["FAMILIES"]


def _draw(draw: Draw) -> Problem:
    outer = [draw.size(3) for _ in range(draw.pick(0, 1, 1, 2))]
    samples, rows, columns = draw.size(4), draw.size(40), draw.size(60)
    if draw.is_big:
        outer, samples = [2], 2
        rows, columns = draw.pick((60, 900), (200, 150), (8, 5000))
    costs = draw.numbers(*outer, samples, rows, columns)
    if draw.chance(0.2):  # Invalid pairs have one high cost.
        costs.masked_fill_(draw.uniform(0, 1, *costs.shape) < 0.3, 1e8)
    counts = draw.whole(0, rows + 1, samples)
    if draw.chance(0.1):  # Numbers out of range are taken as the nearest that is possible.
        counts += draw.whole(-50, 50, samples)
    return Problem(
        {"costs": draw.place(draw.with_bad_numbers(costs), torch.float64), "counts": draw.place(counts)},
        positions=("costs",),
        must_refuse="the CPU has no kernel" if draw.device == "cpu" else "",
    )


def _compare(problem: Problem, outputs: tuple[Any, ...], expected: dict[str, Any]) -> str:
    """Return what is wrong. Where a cost is not finite, the result only has to be one to one."""
    from scipy.optimize import linear_sum_assignment as solve

    costs, counts = problem.arguments["costs"].cpu(), problem.arguments["counts"].cpu()
    got = outputs[0].cpu()
    *outer, rows, columns = costs.shape
    if got.shape != (*outer, columns) or got.dtype != torch.int64:
        return f"the result is {got.dtype} {list(got.shape)}"
    for place in itertools.product(*map(range, outer)):
        count = min(max(int(counts[place[-1]]), 0), rows)
        matrix, found = costs[place][:count], got[place]
        assigned = found[found != rows]
        if assigned.unique().numel() != min(count, columns) or not bool(
            ((assigned >= 0) & (assigned < count)).all()
        ):
            return f"the assignment {list(place)} is not one to one"
        if len(assigned) != min(count, columns):
            return f"the assignment {list(place)} gives {len(assigned)} of {min(count, columns)} pairs"
        if not bool(matrix.isfinite().all()):
            continue
        wanted = torch.full((columns,), rows)
        for row, column in zip(*solve(matrix.numpy()), strict=True):
            wanted[column] = int(row)
        if not torch.equal(found, wanted):
            return f"the assignment {list(place)} is {found.tolist()}, scipy's is {wanted.tolist()}"
    return ""


def _reference(costs: Tensor, counts: Tensor) -> Tensor:
    """Return zeros, because ``_compare`` calls scipy itself."""
    return costs.new_zeros(())


FAMILIES = (
    Family(
        "linear_sum_assignment",
        linear_sum_assignment,
        _draw,
        _reference,
        compare=_compare,
        spoiled={"costs": ("type",), "counts": ("rank", "type", "device", 0)},
    ),
)
