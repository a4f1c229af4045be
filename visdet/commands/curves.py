"""Draw the curves of the losses, the learning rate and the AP of one or several runs to a PNG file.

visdet curves work_dirs/deformable-detr_shapes
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs", nargs="+", metavar="WORK_DIR|JSON", help="the folder of a run, or a scalars.json file"
    )
    parser.add_argument("--out", help="the PNG file to write (default: curves.png beside the first log)")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from visdet.engine import check_out_file, draw_curves, read_scalars, say

    first = Path(args.runs[0])
    out_file = args.out or str((first if first.is_dir() else first.parent) / "curves.png")
    runs = {str(Path(run)): read_scalars(run) for run in args.runs}
    check_out_file(out_file)
    draw_curves(runs, out_file)
    for run, curves in runs.items():
        last = {name: list(curve.values())[-1] for name, curve in curves.items()}
        shown = [name for name in last if name in ("loss", "lr") or name.endswith("bbox_mAP")]
        say(f"{run}: " + "  ".join(f"{name} {last[name]:.4g}" for name in shown))
    say(f"wrote the curves to {out_file}")
