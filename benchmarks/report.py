"""The report, which is JSON, and the options of the programs that write one."""

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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
