"""Evaluate a checkpoint on the test set of its config.

visdet test work_dirs/deformable-detr_shapes/best.pth
"""

import argparse

from visdet.command_line import add_config_arguments, options_of


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


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from visdet.data_folder import evaluate

    evaluate(args.config, args.checkpoint, args.cfg_options, **options_of(args))
