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


def run(runs: list[str], out: str | None) -> None:
    """Run the command."""
    from visdet.engine import check_out_file, draw_curves, read_scalars, say

    paths = list(map(Path, runs))
    first = paths[0]
    out_file = out or str((first if first.is_dir() else first.parent) / "curves.png")
    curves_of = {str(path): read_scalars(path) for path in paths}
    check_out_file(out_file)
    draw_curves(curves_of, out_file)
    for run, curves in curves_of.items():
        shown = []
        for name, curve in curves.items():
            if name in ("loss", "lr") or name.endswith("bbox_mAP"):
                *_earlier, last = curve.values()
                shown.append(f"{name} {last:.4g}")
        say(f"{run}: {'  '.join(shown)}")
    say(f"wrote the curves to {out_file}")
