"""Time assignments on a GPU beside scipy's on the host: python -m benchmarks.linear_sum_assignment.

For each size it prints, in microseconds, the wall time of a call on the GPU, and the time in which the costs go to the
host, scipy solves the problems, and the assignments come back. The costs are random, or such that all rows prefer the
same columns, which takes longer. This needs a GPU.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from visdet.models.matching.assignment import solve_on_host
from visdet.ops.fused import linear_sum_assignment

CALLS = 20

# layers, targets of each image, rows with padding, queries
CASES: dict[str, tuple[int, tuple[int, ...], int, int]] = {
    "SparseDrive, boxes": (6, (40, 64, 35, 20), 64, 900),
    "SparseDrive, lines": (6, (9, 30, 16, 17), 32, 100),
    "Deformable DETR, 2 images": (6, (20, 15), 32, 300),
    "Deformable DETR, 8 images": (6, (20, 15, 30, 60, 4, 7, 10, 8), 64, 300),
    "proposals of the encoder": (1, (20, 15), 32, 22223),
}


def costs_of(case: str, all_prefer_the_same: bool) -> tuple[Tensor, Tensor]:
    """Return costs [layers, B, N, Q] and counts [B] on the CPU."""
    layers, counts, rows, queries = CASES[case]
    generator = torch.Generator().manual_seed(0)
    costs = torch.randn(layers, len(counts), rows, queries, dtype=torch.float64, generator=generator)
    if all_prefer_the_same:
        costs = 0.1 * costs + torch.linspace(0, 3, queries, dtype=torch.float64)
    return costs, torch.tensor(counts)


def microseconds(call: Callable[[], object]) -> float:
    """Return the mean wall time of a call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / CALLS


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.linear_sum_assignment", description=__doc__.splitlines()[0]
    ).parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.linear_sum_assignment: this needs a GPU", file=sys.stderr)
        return 1
    for case in CASES:
        for name, hard in (("random", False), ("all prefer the same", True)):
            on_host, counts_on_host = costs_of(case, hard)
            costs, counts = on_host.cuda(), counts_on_host.cuda()
            ours = microseconds(functools.partial(linear_sum_assignment, costs, counts))
            scipy = microseconds(functools.partial(solve_on_host, costs, counts_on_host.tolist()))
            print(f"{case}, {name}: {ours:.0f} on the GPU, {scipy:.0f} by the host", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
