"""Check that the unmodified sources of public repositories run on visdet's operators.

python tools/check_upstream.py PATH...

Each PATH is a checkout, which is recognised by the files in it. Its model is built from its own config without
pretrained weights, takes two training steps and predicts two frames, in a process of its own under
``python -m visdet.compat run``. The tool prints a table, and the logs are in the folder of ``--work``. docs/upstream.md
names the packages that the repositories need.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from upstream.recipes import Recipe, recognise

COLUMNS = (
    "repository",
    "device",
    "imports",
    "builds",
    "loss",
    "gradients",
    "prediction",
    "seconds",
    "first obstacle",
)
TIMES = ("model", "code", "numbers", "training step", "prediction", "memory reserved by training")
ROOT = Path(__file__).resolve().parents[1]


def run(recipe: Recipe, checkout: Path, paths: list[Path], options: argparse.Namespace) -> dict[str, str]:
    """Return the row of the table for one model."""
    stem = re.sub(r"[^a-z0-9-]+", "_", recipe.name.lower()).strip("_")
    report, log = options.work / f"{stem}.json", options.work / f"{stem}.log"
    report.unlink(missing_ok=True)
    worker = Path(__file__).with_name("upstream") / "worker.py"
    command = [sys.executable, "-m", "visdet.compat", "run", str(worker), recipe.name]
    command += [str(options.work), options.device, str(options.scale), str(report)]
    command += [options.task, str(options.samples)]
    needed = [path for path in paths if any((path / name).is_dir() for name in recipe.needs)]
    path = os.pathsep.join(filter(None, [str(ROOT), *map(str, needed), os.environ.get("PYTHONPATH")]))
    start = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=checkout / recipe.folder,
            env=os.environ | {"PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status: int | None = process.wait(timeout=options.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
    seconds = time.perf_counter() - start
    entries = read(report)
    times = [cells for stage, cells in entries if stage == "time"]
    if times:
        print(
            table(TIMES, [dict(zip(TIMES, [recipe.name, *cells], strict=True)) for cells in times]),
            flush=True,
        )
    return row(recipe.name, options, entries, status, seconds, log)


def read(report: Path) -> list[tuple[str, object]]:
    lines = report.read_text().splitlines() if report.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def row(
    name: str,
    options: argparse.Namespace,
    entries: list[tuple[str, object]],
    status: int | None,
    seconds: float,
    log: Path,
) -> dict[str, str]:
    """Return the cells of one row from what the process has reported and how it ended."""
    values = {stage: str(value) for stage, value in entries if stage != "obstacle"}
    obstacles = [str(value) for stage, value in entries if stage == "obstacle"]
    if status is None:
        obstacles.append(f"stopped after {options.limit:g} s")
    elif status and not obstacles:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        obstacles.append(f"exit status {status}: {lines[-1].strip()[:160] if lines else 'no output'}")
    cells = {column: values.get(column, "-") for column in COLUMNS}
    return cells | {
        "repository": name,
        "device": options.device + ("*" if "asked_for_cuda" in values else ""),
        "seconds": f"{seconds:.0f}",
        "first obstacle": obstacles[0] if obstacles else "-",
    }


def table(columns: tuple[str, ...], rows: list[dict[str, str]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [" | ".join(columns), "|".join("---" for _ in columns)]
    lines += [" | ".join(cells[column].replace("|", "/") for column in columns) for cells in rows]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="checkouts")
    parser.add_argument("--only", help="run only the models whose name contains this text")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is a GPU)")
    parser.add_argument(
        "--limit", type=float, default=1200, help="seconds for each model (default: %(default)s)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("work_dirs/upstream"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument(
        "--scale",
        type=float,
        help="factor of the driving models' image size (default: 0.5 on the CPU, else 1)",
    )
    parser.add_argument(
        "--compare",
        dest="task",
        action="store_const",
        const="compare",
        default="check",
        help="compare SparseDrive's sources with visdet's model on the same weights and frames",
    )
    parser.add_argument(
        "--time",
        dest="task",
        action="store_const",
        const="time",
        help="show the median times of training steps and predictions of SparseDrive's sources and visdet's model",
    )
    parser.add_argument(
        "--samples", type=int, default=1, help="samples of a training step with --time (default: %(default)s)"
    )
    options = parser.parse_args()
    paths = [path.resolve() for path in options.paths]
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.device is None:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.scale = options.scale or (0.5 if options.device == "cpu" else 1.0)
    jobs = [(recipe, path) for path in paths for recipe in recognise(path)]
    unknown = [path for path in paths if not recognise(path) and not (path / path.name).is_dir()]
    for path in unknown:
        print(f"{path} is no checkout that this tool knows (see tools/upstream/recipes.py)", file=sys.stderr)
    rows = []
    for recipe, path in jobs:
        if options.only is None or options.only.lower() in recipe.name.lower():
            rows.append(run(recipe, path, paths, options))
            print(" | ".join(rows[-1].values()), flush=True)
    print(f"\n{table(COLUMNS, rows)}")
    if any(cells["device"].endswith("*") for cells in rows):
        print(
            "\n* This code asks for CUDA by itself. On a machine without a GPU, the check answers with the CPU."
        )
    return 1 if unknown or any(cells["first obstacle"] != "-" for cells in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
