"""Detect objects in images and videos. The detections are written to a JSON file and drawn into a copy of each file.

Without --out-dir, each run gets a folder of its own. A camera is named by its number, and a stream by its address.
Ctrl-C ends them, and what was found until then is written.

visdet infer work_dirs/deformable-detr_shapes/best.pth data/shapes/val
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from visdet.command_line import add_config_arguments, folder_name, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    names = ("checkpoint", "images")
    add_config_arguments(parser, *names, "--score-thr", "--graph", "--batch-size", "--amp", "--device")
    add(
        "--out-dir",
        type=folder_name,
        help="folder to write (default: the first of work_dirs/detections, work_dirs/detections_2 ... that is new)",
    )
    add(
        "--tiles",
        type=positive_int,
        metavar="SIDE",
        help="cut larger pictures into tiles of SIDE x SIDE pixels, for objects that are small in them",
    )
    add("--overlap", type=float, default=0.2, help="share of a tile that the next one shows, too")
    add(
        "--nms",
        type=float,
        metavar="IOU",
        help="leave out a detection that a better one of its class overlaps so far",
    )
    add("--json-only", action="store_true", help="write predictions.json alone, and no pictures")


def _with_progress(results: Iterator[Any], num_files: int) -> Iterable[Any]:
    """Return the results, and show how many of the files have some."""
    from rich.progress import track

    from visdet.engine.process.console import console

    return track(results, "", num_files, console=console, transient=True)


def _counts(found: list[dict[str, Any]]) -> str:
    """Return how many detections there are, and in how many images and frames."""
    total = sum(len(image["detections"]) for image in found)
    frames = sum("frame" in image for image in found)
    of_videos = f" and {frames} frames of videos" if frames else ""
    return f"{total} detections in {len(found) - frames} images{of_videos}"


@contextmanager
def _new_folder() -> Iterator[str]:
    """Make the first of work_dirs/detections, work_dirs/detections_2 … that does not exist; no other run takes it.

    A folder that is empty when the block ends is removed.
    """
    folder = "work_dirs/detections"
    number = 1
    while True:
        try:
            os.makedirs(folder)
            break
        except FileExistsError:
            number += 1
            folder = f"work_dirs/detections_{number}"
    try:
        yield folder
    finally:
        with suppress(OSError):  # It is not empty.
            os.removedirs(folder)


def run(out_dir: str | None, **options: Any) -> None:
    """Run the command."""
    with _new_folder() if out_dir is None else nullcontext(out_dir) as folder:
        _detect(out_dir=folder, **options)


def _detect(
    config: str,
    checkpoint: str,
    images: list[str],
    cfg_options: dict[str, Any] | None,
    out_dir: str,
    score_thr: float | None,
    graph: bool | None,
    device: str | None,
    json_only: bool,
    overlap: float,
    nms: float | None,
    **others: Any,
) -> None:
    from visdet.engine import Detector, detect_files, find_images, load_config, say
    from visdet.engine.checkpoints.score_thresholds import told_thresholds
    from visdet.engine.config.checks import section_of
    from visdet.engine.inference.detect_files import check_shares
    from visdet.engine.process.places import check_out_file

    draws = not json_only
    check_shares(score_thr, overlap, nms)
    cfg, _ = load_config(config, cfg_options)
    if graph is not None:
        cfg.graph = graph
    files, left_out = find_images(images, out_dir)
    check_out_file(Path(out_dir, "predictions.json"), "--out-dir")
    detector = Detector(cfg, checkpoint, device)
    if score_thr is None:
        names = detector.dataset_meta["classes"]
        thresholds = detector.score_thresholds
        origin = detector.origin_of_thresholds
    else:
        names = ["all"]
        thresholds = [score_thr]
        origin = "--score-thr"
    say(told_thresholds(names, thresholds, origin))
    found, failures = detect_files(
        detector,
        files,
        out_dir,
        score_thr,
        draws=draws,
        shown=_with_progress,
        overlap=overlap,
        nms=nms,
        **others,
    )
    pictures = f" and {out_dir}/pictures" if draws else ""
    say(f"wrote {_counts(found)} to {out_dir}/predictions.json{pictures}")
    side = section_of(cfg, "visualizer").get("min_side", 480)
    if draws and (small := sum(max(one["height"], one["width"]) < side for one in found)):
        left_out.append(f"{small} pictures of less than {side} pixels are enlarged (visualizer.min_side)")
    for remark in left_out:
        say(remark)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    if failures:
        print(f"{len(failures)} of {len(files)} files could not be read", file=sys.stderr)
        sys.exit(1)
