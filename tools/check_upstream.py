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
ROOT = Path(__file__).resolve().parents[1]


def run(recipe: Recipe, checkout: Path, paths: list[Path], options: argparse.Namespace) -> dict[str, str]:
    """Return the row of the table for one model."""
    stem = re.sub(r"[^a-z0-9-]+", "_", recipe.name.lower()).strip("_")
    report, log = options.work / f"{stem}.json", options.work / f"{stem}.log"
    report.unlink(missing_ok=True)
    worker = Path(__file__).with_name("upstream") / "worker.py"
    command = [sys.executable, "-m", "visdet.compat", "run", str(worker), recipe.name, str(options.work)]
    command += [options.device, str(options.scale), str(report), options.task]
    needed = [path for path in paths if any((path / name).is_dir() for name in recipe.needs)]
    path = os.pathsep.join(filter(None, [str(ROOT), *map(str, needed), os.environ.get("PYTHONPATH")]))
    place = {"cwd": checkout / recipe.folder, "env": os.environ | {"PYTHONPATH": path}}
    start = time.perf_counter()
    with log.open("w") as output:
        try:
            done = subprocess.run(command, stdout=output, stderr=output, timeout=options.limit, **place)
            obstacle = f"exit status {done.returncode}: " if done.returncode else ""
        except subprocess.TimeoutExpired:
            obstacle = f"stopped after {options.limit:g} s"
    seconds = time.perf_counter() - start
    if obstacle.endswith(": "):
        obstacle += next(
            filter(None, map(str.strip, reversed(log.read_text(errors="replace").splitlines()))), "-"
        )
    found = json.loads(report.read_text()) if report.exists() else {}
    return dict.fromkeys(COLUMNS, "-") | {
        "repository": recipe.name,
        "device": options.device + ("*" if found.pop("asked_for_cuda", False) else ""),
        "first obstacle": found.pop("obstacle", "") or obstacle[:160] or "-",
        "seconds": f"{seconds:.0f}",
        **{stage: str(value) for stage, value in found.items() if stage in COLUMNS},
    }


def table(rows: list[dict[str, str]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


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
    print(f"\n{table(rows)}")
    if any(cells["device"].endswith("*") for cells in rows):
        print(
            "\n* This code asks for CUDA by itself. On a machine without a GPU, the check answers with the CPU."
        )
    return 1 if unknown or any(cells["first obstacle"] != "-" for cells in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
