"""The report, which is JSON, and a table of it in Markdown on the terminal."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Report = dict[str, Any]  # "environment", "floors", "command", "results"; all of it plain JSON


def write_report(report: Report, path: Path) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def parser_of(name: str, text: str, has_device: bool = True) -> argparse.ArgumentParser:
    """Return the parser of ``python -m benchmarks.NAME``, with the options of all such programs.

    Args:
        name: the name of the program.
        text: its docstring, of which the first line describes it.
        has_device: whether the user chooses the device.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=text.splitlines()[0])
    if has_device:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        about = "device to run on: cpu, cuda or cuda:N (default: %(default)s)"
        parser.add_argument("--device", default=default, help=about)
    folder = Path("work_dirs/bench")
    parser.add_argument(
        "--out", type=Path, default=folder, help="folder of the report (default: %(default)s)"
    )
    return parser


def write_table(report: Report, lines: Sequence[str], path: Path) -> None:
    """Write a report as JSON and its table as Markdown beside it, and print the table."""
    write_report(report, path)
    body = "\n".join(lines)
    facts = f"`{report['command']}`: {facts_of(report)}"
    page = path.with_suffix(".md")
    page.write_text(f"{facts}\n\n{body}\n")
    print(f"\n{facts}\n\n{body}\n\nwrote {page} and {path}")


def options_of(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line, by default that of this process, which is ``command`` among them."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    options.command = shlex.join([*parser.prog.split(), *given])
    return options


def facts_of(report: Report) -> str:
    """Return a line with what the figures depend on."""
    return ", ".join(f"{label} {value}" for label, value in report["environment"].items())


def short_table(report: Report) -> str:
    """Return a table with case, dtype, pass, time, percent of the floor, ratios of peers."""
    peers = _peers(report)
    rows = [["case", "dtype", "pass", "median", "floor", *peers]]
    for result in report["results"]:
        name = [f"{result['op']}/{result['case']}", result["dtype"]]
        if not result["gate"]["passed"]:
            rows.append([*name, "not timed: red gate", *[""] * (len(peers) + 2)])
        for kind, figures in result["passes"].items():
            ratios = [_ratio(result, peer, kind) for peer in peers]
            median, percent = _time(figures["time"]["median_us"]), f"{figures['percent_of_floor']:.0f} %"
            rows.append([*name, _label(kind), median, percent, *ratios])
    return "\n".join(table(rows[0], rows[1:]))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def _peers(report: Report) -> list[str]:
    return list(dict.fromkeys(peer for result in report["results"] for peer in result["peers"]))


def _label(kind: str) -> str:
    return kind.replace("_", " ")


def _ratio(result: dict[str, Any], peer: str, kind: str) -> str:
    ratio = result["peers"].get(peer, {}).get("times_slower", {}).get(kind)
    return "" if ratio is None else f"{peer} {ratio:.3g}x"


def _time(us: float) -> str:
    """Return ``us`` as text with at least three significant digits, in ms from 10 ms on."""
    if us >= 1e4:
        return f"{us / 1e3:.0f} ms" if us >= 1e5 else f"{us / 1e3:.1f} ms"
    return f"{us:.0f} µs" if us >= 100 else f"{us:.3g} µs"
