"""Fuzz operators by comparing random problems with a float64 reference (docs/fuzzing.md)."""

import argparse
import os
import sys
import time
from collections import Counter

from .check import Outcome
from .operators import OPERATORS
from .processes import run_batches, run_range

__all__ = ["main"]

SHOWN = 3  # number of failures of one kind that are printed in full with --keep-going


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("op", choices=["all", *OPERATORS], metavar="OP", help=f"all, {', '.join(OPERATORS)}")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="device to run on (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, help="seed of the first call (without --calls and --minutes, the only call)"
    )
    parser.add_argument("--calls", type=int, help="number of calls of each operator")
    parser.add_argument(
        "--minutes",
        type=float,
        help="time of all operators together (default: 1, unless --calls or --seed is given)",
    )
    parser.add_argument(
        "--jobs", type=int, help="number of parallel processes (default: one per core on the CPU, 1 on CUDA)"
    )
    parser.add_argument(
        "--batch", type=int, help="number of calls per process (default: 200 on the CPU, 1000 on CUDA)"
    )
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds that a call may take (default: %(default)s)"
    )
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    parser.add_argument(
        "--in-process", action="store_true", help="run the calls in this process, for a debugger"
    )
    chosen = parser.parse_args(arguments)
    if chosen.calls is None and chosen.minutes is None:
        chosen.calls, chosen.minutes = (1, None) if chosen.seed is not None else (None, 1.0)
    return chosen


class Report:
    """Counts outcomes and prints failures."""

    def __init__(self, name: str, chosen: argparse.Namespace) -> None:
        self.name, self.chosen = name, chosen
        self.kinds: Counter[str] = Counter()
        self.failed_seeds: dict[str, list[int]] = {}

    def add(self, seed: int, outcome: Outcome) -> None:
        kind = outcome.kind
        self.kinds[kind] += 1
        if not outcome.is_failure:
            return
        seeds = self.failed_seeds.setdefault(kind, [])
        seeds.append(seed)
        if len(seeds) <= SHOWN:
            print(f"FAILURE ({kind}) of {self.name}: {outcome.message}")
            print(f"  repeat: {self.command(seed, 1)}", flush=True)
            if kind in ("crash", "hang", "CUDA error") and self.chosen.batch > 1:
                self._confirm(seed, kind)

    def command(self, seed: int, calls: int) -> str:
        text = f"python -m tests.fuzz {self.name} --device {self.chosen.device} --seed {seed}"
        return text if calls == 1 else f"{text} --calls {calls} --batch {calls}"

    def _confirm(self, seed: int, kind: str) -> None:
        """Print how many of the calls before it a failure needs, if it does not repeat alone."""
        calls = 1
        while calls <= self.chosen.batch:
            seeds = range(seed - calls + 1, seed + 1)
            found = run_batches(
                self.name,
                seeds,
                self.chosen.device,
                jobs=1,
                batch_size=calls,
                limit_s=self.chosen.limit,
                until=time.monotonic() + 300,
            )
            if any(outcome.kind == kind for _, outcome in found):
                if calls > 1:
                    print(f"  it needs the calls before it: {self.command(seeds[0], calls)}", flush=True)
                return
            calls *= 4
        print("  it did not repeat", flush=True)

    @property
    def failures(self) -> int:
        return sum(len(seeds) for seeds in self.failed_seeds.values())

    def summary(self, seconds: float) -> str:
        parts = [f"{self.kinds.total()} calls in {seconds:.0f} s", f"{self.kinds['refused']} refused clearly"]
        parts += [
            f"{len(s)} {kind} (seeds {', '.join(map(str, s[:5]))})" for kind, s in self.failed_seeds.items()
        ]
        return f"{self.name} on {self.chosen.device}: {', '.join(parts)}; {self.failures} failures"


def fuzz(name: str, chosen: argparse.Namespace, first_seed: int, seconds: float) -> Report:
    """Run the calls of one operator and return their report."""
    report, began = Report(name, chosen), time.monotonic()
    seeds = range(first_seed, first_seed + (chosen.calls or 10**9))
    if chosen.in_process:
        results = run_range(name, seeds, chosen.device)
    else:
        results = run_batches(
            name,
            seeds,
            chosen.device,
            jobs=chosen.jobs,
            batch_size=chosen.batch,
            limit_s=chosen.limit,
            until=began + seconds,
        )
    for seed, outcome in results:
        report.add(seed, outcome)
        if (report.failures and not chosen.keep_going) or time.monotonic() - began > seconds:
            break
    print(report.summary(time.monotonic() - began), flush=True)
    return report


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return 1 if any call failed, otherwise 0."""
    chosen = parse(arguments)
    # Without this variable, cuBLAS refuses to run under deterministic algorithms.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    chosen.jobs = chosen.jobs or (1 if chosen.device == "cuda" else len(os.sched_getaffinity(0)))
    chosen.batch = chosen.batch or (1000 if chosen.device == "cuda" else 200)
    names = list(OPERATORS) if chosen.op == "all" else [chosen.op]
    seconds = float("inf") if chosen.minutes is None else 60 * chosen.minutes / len(names)
    first_seed = int(time.time()) % 10**6 * 10**5 if chosen.seed is None else chosen.seed
    print(f"visdet {chosen.op} on {chosen.device}, seeds from {first_seed}", flush=True)
    reports = []
    for name in names:
        reports.append(fuzz(name, chosen, first_seed, seconds))
        if reports[-1].failures and not chosen.keep_going:
            break
    return 1 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
