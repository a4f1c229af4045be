"""Draw the synthetic driving scenes. Training draws them by itself if they are missing.

visdet make-driving-scenes data/driving_scenes
"""

import argparse
from typing import Any

from visdet.command_line import add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("folder", nargs="?", default="data/driving_scenes", help="folder to write (default: %(default)s)")
    add_options(
        parser,
        num_train=(160, "number of training scenes"),
        num_val=(16, "number of validation scenes"),
        num_test=(16, "number of test scenes"),
        num_frames=(20, "number of frames per scene"),
        seed=(0, "seed of the scenes"),
    )
    add(
        "--image-size",
        type=int,
        nargs=2,
        default=(96, 256),
        metavar=("H", "W"),
        help="height and width of an image in pixels (default: 96 256)",
    )
    add("--num-workers", type=int, help="number of processes (default: one per core)")


def run(**options: Any) -> None:
    """Run the command."""
    from visdet.datasets import make_driving_scenes

    make_driving_scenes(**options)
