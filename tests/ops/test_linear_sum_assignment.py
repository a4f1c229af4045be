"""Assignments on a GPU against scipy's. Without a GPU, a CPU emulates the blocks of the kernel."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from emulation import called
from torch import Tensor

from tests.fuzz.problem import Draw, Operator, Problem, Seeded
from visdet.ops.fused import linear_sum_assignment, solves_assignments_on


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
        {"costs": draw.place(costs, torch.float64, bad=0.5), "counts": draw.place(counts)},
        positions=("costs",),
        must_refuse="the CPU has no kernel" if draw.device == "cpu" else "",
    )


def _compare(problem: Problem, outputs: tuple[Any, ...], expected: dict[str, Any]) -> str:
    """Return what is wrong. Where a cost is not finite, the result only has to be one to one."""
    costs, counts = (problem.arguments[name].cpu() for name in ("costs", "counts"))
    *outer, N, Q = costs.shape
    found = outputs[0].cpu()
    if found.shape != (*outer, Q) or found.dtype != torch.int64:
        return f"the result is {found.dtype} {list(found.shape)}"
    counts = counts.clamp(0, N)
    if not bool(are_one_to_one(found, counts, N).all()):
        return "an assignment is not one to one"
    is_finite = costs.isfinite() | (torch.arange(N)[:, None] >= counts[:, None, None])
    is_sound = is_finite.flatten(-2).all(-1)[..., None]
    wanted = solved_by_scipy(torch.where(is_sound[..., None], costs, 0.0), counts)
    is_wrong = (found != wanted) & is_sound
    return f"the columns {is_wrong.nonzero().tolist()} are not scipy's" if bool(is_wrong.any()) else ""


def _reference(costs: Tensor, counts: Tensor) -> Tensor:
    """Return zeros, because ``_compare`` calls scipy itself."""
    return costs.new_zeros(())


OPERATORS = (
    Operator(
        "linear_sum_assignment",
        linear_sum_assignment,
        _draw,
        _reference,
        compare=_compare,
        spoiled={"costs": ("complex", "bool"), "counts": ("rank", "complex", "device", 0)},
    ),
)


scipy_optimize = pytest.importorskip("scipy.optimize")

KERNEL = "cuda/linear_sum_assignment/shortest_path.cuh"
PROGRAM = f"""
#include "{KERNEL}"

using namespace visdet::linear_sum_assignment;

extern "C" void solve(const double* costs, const int64_t* counts, int problems, int samples, int N, int Q, int threads,
                      double* scratch, int64_t* index) {{
  const int64_t doubles = memory_bytes(N < Q ? N : Q, N < Q ? Q : N) / 8;
  emulated::run_grid(problems, 1, threads,
                     [&] {{ assignment_kernel(costs, counts, samples, N, Q, scratch, doubles, index); }});
}}
"""


SHARED = ([KERNEL], "extern __shared__ double shared[];", "static double shared[1 << 14];")


def solved_by_emulation(library, costs, counts, threads, in_shared_memory):
    *_, samples, N, Q = costs.shape
    problems = costs.numel() // (N * Q)
    index = torch.full((*costs.shape[:-2], Q), -7)
    bytes_of_block = 12 * min(N, Q) + 28 * max(N, Q)
    # What is read before it was written is not a number.
    scratch = torch.full((problems * (bytes_of_block + 7) // 8 + problems,), torch.nan, dtype=torch.float64)
    memory = None if in_shared_memory else scratch
    called(library.solve, costs, counts, problems, samples, N, Q, threads, memory, index)
    return index


def solved_by_scipy(costs, counts):
    *outer, N, Q = costs.shape
    index = torch.full((*outer, Q), N)
    for place in np.ndindex(*outer):
        rows, columns = scipy_optimize.linear_sum_assignment(costs[place][: counts[place[-1]]].numpy())
        index[place][torch.from_numpy(columns)] = torch.from_numpy(rows)
    return index


def draw(layers, counts, N, Q, kind, seed):
    numbers = Seeded(seed)
    costs = numbers.normal(layers, len(counts), N, Q)
    if kind == "equal":  # Many assignments cost the same.
        costs = (costs * 1.5).round()
    if kind == "invalid":  # as for_solver writes costs that are not finite
        costs[torch.rand(costs.shape, generator=numbers.generator) < 0.3] = 1e8
    if kind == "near":  # Costs like those of predictions: all rows prefer the same few columns.
        costs = costs * 0.1 + torch.linspace(0, 3, Q, dtype=torch.float64)
    return costs, torch.tensor(counts)


CASES = [
    # layers, counts, N, Q, threads of a block
    (2, [5, 0, 16, 9], 16, 40, 32),
    (1, [7, 3], 7, 7, 32),
    (1, [12, 5], 12, 5, 32),  # more rows than columns
    (3, [1], 1, 1, 32),
    (1, [20], 32, 150, 96),
    (1, [33], 64, 33, 64),  # as many as columns, beside padding
]


of_all_kinds = pytest.mark.parametrize("kind", ["random", "equal", "invalid", "near"])


@of_all_kinds
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_emulated_kernel_agrees_with_scipy(library, case, kind):
    layers, counts, N, Q, threads = case
    for seed in range(2):
        costs, rows = draw(layers, counts, N, Q, kind, seed)
        expected = solved_by_scipy(costs, rows)
        assert torch.equal(solved_by_emulation(library, costs, rows, threads, True), expected)
        assert torch.equal(solved_by_emulation(library, costs, rows, threads, False), expected)


def test_the_emulated_kernel_ends_with_bad_numbers(library):
    """Costs that are not finite give some one-to-one assignment, and nothing is written out of place."""
    for seed in range(4):
        costs, rows = draw(2, [9, 4, 12], 12, 10, "random", seed)
        for bad in (torch.nan, torch.inf, -torch.inf):
            costs[torch.rand(costs.shape) < 0.3] = bad
        for in_shared_memory in (True, False):
            index = solved_by_emulation(library, costs, rows, 32, in_shared_memory)
            assert are_one_to_one(index, rows, 12).all()


def are_one_to_one(index, counts, N):
    """Return whether each assignment [..., Q] gives all its rows, or a row to every column, and none twice."""
    times = F.one_hot(index.clamp(0, N), N + 1)[..., :N].sum(-2)
    is_row = (index >= 0) & (index < counts[:, None])
    has_all = is_row.sum(-1) == counts.clamp(max=index.shape[-1])
    return has_all & (is_row | (index == N)).all(-1) & (times <= 1).all(-1)


@pytest.mark.cuda
@of_all_kinds
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        (6, [40, 64, 3, 0], 64, 900, 0),
        (6, [9, 30, 1, 17], 32, 100, 0),
        (1, [70, 12], 128, 30000, 0),  # The memory of a block does not suffice.
        (1, [9000], 9000, 3, 0),
    ],
    ids=str,
)
def test_the_kernel_agrees_with_scipy(case, kind):
    layers, counts, N, Q, _ = case
    costs, rows = draw(layers, counts, N, Q, kind, 0)
    found = linear_sum_assignment(costs.cuda(), rows.cuda())
    assert torch.equal(found.cpu(), solved_by_scipy(costs, rows))
    turned = costs.cuda().transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(linear_sum_assignment(turned, rows.cuda()), found)


def test_there_is_no_kernel_for_the_cpu():
    costs = torch.zeros(1, 4, 5, dtype=torch.float64)
    assert not solves_assignments_on(costs)
    with pytest.raises(
        RuntimeError, match=r"scipy.optimize.linear_sum_assignment solves assignments on the CPU"
    ):
        linear_sum_assignment(costs, torch.zeros(1).long())
