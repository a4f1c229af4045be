"""Evaluate a checkpoint on the test set of its config.

visdet test work_dirs/deformable-detr_shapes/best.pth
"""

import argparse
from typing import Any

from visdet.command_line import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser, "checkpoint", "--data", "--work-dir", "--graph", "--launcher", "--amp")
    parser.add_argument(
        "--out",
        metavar="FILE.json",
        help="write the predictions of every sample to this file, in COCO's format of results if it is FILE.bbox.json",
    )
    parser.add_argument(
        "--show-dir", metavar="FOLDER", help="write pictures of predictions and ground truth to this folder"
    )


def run(config: str, checkpoint: str, cfg_options: dict[str, Any] | None, **options: Any) -> None:
    """Run the command."""
    from visdet.data_folder import evaluate

    evaluate(config, checkpoint, cfg_options, **options)
