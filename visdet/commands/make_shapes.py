"""Draw the synthetic shapes data set. Training draws it by itself if it is missing.

visdet make-shapes data/shapes
visdet make-shapes data/rotated_shapes --rotated
"""

import argparse
from typing import Any

from visdet.command_line import add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("folder", nargs="?", default="data/shapes", help="folder to write (default: %(default)s)")
    add_options(
        parser,
        num_train=(4000, "number of training images"),
        num_val=(400, "number of validation images"),
        image_size=(128, "height and width of an image in pixels"),
        seed=(0, "seed of the images"),
    )
    add("--rotated", action="store_true", help="draw stretched shapes, with turned boxes")
    add("--num-workers", type=int, help="number of processes (default: one per core)")


def run(**options: Any) -> None:
    """Run the command."""
    from visdet.datasets import make_shapes

    make_shapes(**options)
