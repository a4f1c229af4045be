"""Evaluate a checkpoint on the test set of its config.

visdet test deformable_detr/deformable-detr_shapes work_dirs/deformable-detr_shapes/best_*.pth
"""

import argparse

from visdet.command_line import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser)
    parser.add_argument("checkpoint", help="a checkpoint file or its http(s) address")
    parser.add_argument("--work-dir", help="folder to write (default: work_dirs/<name of the config>)")
    parser.add_argument(
        "--out", metavar="FILE.json", help="write the predictions of every sample to this file"
    )
    parser.add_argument(
        "--show-dir", metavar="FOLDER", help="write pictures of predictions and ground truth to this folder"
    )
    parser.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        help="replay predictions as CUDA graphs on a GPU (default: the config's graph, True)",
    )
    parser.add_argument(
        "--launcher",
        choices=("none", "pytorch"),
        help="launcher of the processes (default: 'pytorch' under torchrun, 'none' otherwise)",
    )


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from visdet.engine import evaluate

    evaluate(
        args.config,
        args.checkpoint,
        args.cfg_options,
        work_dir=args.work_dir,
        out=args.out,
        show_dir=args.show_dir,
        graph=args.graph,
        launcher=args.launcher,
    )
