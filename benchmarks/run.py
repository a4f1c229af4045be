"""Check and time every case of every operator.

The command is ``python -m benchmarks.run``. It needs torch, numpy and the built operators. If they are installed,
triton is used for its do_bench on a GPU. The exit status is 1 if a gate was red, a pass failed, or no case was
selected.
"""

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import ops
from .case import Case, dtype_name
from .environment import describe
from .floors import floors_of
from .measure import measure
from .report import facts_of, options_of, parser_of, write_report
from .write_docs import time_row, times_table, write_docs


def all_cases() -> list[Case]:
    """Return the cases of every file in benchmarks/ops."""
    names = sorted(module.name for module in pkgutil.iter_modules(ops.__path__))
    return [case for name in names for case in importlib.import_module(f"{ops.__name__}.{name}").CASES]


def select(cases: Sequence[Case], words: Sequence[str], device: torch.device) -> list[Case]:
    """Return the cases whose ``op/name`` contains one of ``words``, or all cases without words.

    On a CPU, heavy cases are selected by their name only.
    """

    def is_named(text: str) -> bool:
        return any(word in text for word in words)

    return [
        case
        for case in cases
        if (not words or is_named(case.title))
        and (device.type == "cuda" or not case.heavy or is_named(case.name))
    ]


def run(
    cases: Sequence[Case],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    out: Path,
    quick: bool = False,
    command: str = "",
) -> bool:
    """Measure ``cases`` in ``dtypes``, write the report to ``out`` after each, and return whether all succeeded."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    environment = describe(device)
    floors = floors_of(device, environment["device"])
    report = {
        "environment": environment,
        "floors": floors.source,
        "command": command,
        "results": [],
    }
    print(facts_of(report), flush=True)
    for case in cases:
        for dtype in dtypes:
            if dtype not in case.dtypes:
                continue
            print(f"{case.title} {dtype_name(dtype)} ...", flush=True)
            result = measure(case, dtype, device, floors, quick)
            for problem in result["gate"]["problems"]:
                print(f"  RED GATE, not timed: {problem}", flush=True)
            for kind, problem in result["failures"].items():
                print(f"  FAILED: {kind}: {problem}", flush=True)
            report["results"].append(result)
            write_report(report, out / "bench.json")
    rows = [time_row(result) | {"case": f"{result['op']}/{result['case']}"} for result in report["results"]]
    print("", *times_table(rows), "", f"wrote {out / 'bench.json'}", sep="\n")
    return all(result["gate"]["passed"] and not result["failures"] for result in report["results"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of("run", __doc__)
    parser.add_argument(
        "--cases", nargs="+", default=[], metavar="WORD", help="cases whose op/name contains a WORD"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=["float32", "bfloat16", "float16"],
        help="dtypes of the values (default: all three on a GPU, float32 on a CPU)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="repeat for a fraction of the time, for a first look"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument(
        "--write-docs", action="store_true", help="write the medians to the pages of docs/kernels"
    )
    options = options_of(parser, arguments)
    if options.write_docs and options.quick:
        parser.error("--write-docs needs figures of full length, without --quick")

    cases = all_cases()
    if options.list:
        print("\n".join(f"{case.title}: {case.sizes}" for case in cases))
        return 0
    device = torch.device(options.device)
    chosen = select(cases, options.cases, device)
    if not chosen:
        print(f"no case matches {' '.join(options.cases)}; --list lists the cases", file=sys.stderr)
        return 1
    names = options.dtypes or (["float32", "bfloat16", "float16"] if device.type == "cuda" else ["float32"])
    green = run(
        chosen,
        [getattr(torch, name) for name in names],
        device,
        options.out,
        options.quick,
        options.command,
    )
    if options.write_docs and green:
        write_docs([options.out / "bench.json"])
    elif options.write_docs:
        print("docs/kernels is not changed, because a gate was red or a pass failed", file=sys.stderr)
    return 0 if green else 1


if __name__ == "__main__":
    sys.exit(main())
