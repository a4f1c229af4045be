"""Draw the synthetic shapes data set. Training draws it by itself if it is missing.

visdet make-shapes data/shapes
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "folder", nargs="?", default="data/shapes", help="folder to write (default: %(default)s)"
    )
    parser.add_argument(
        "--num-train", type=int, default=4000, help="number of training images (default: %(default)s)"
    )
    parser.add_argument(
        "--num-val", type=int, default=400, help="number of validation images (default: %(default)s)"
    )
    parser.add_argument(
        "--image-size",
        type=int,
        default=128,
        help="height and width of an image in pixels (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the images (default: %(default)s)")
    parser.add_argument("--num-workers", type=int, help="number of processes (default: one per core)")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from visdet.datasets import make_shapes

    make_shapes(args.folder, args.num_train, args.num_val, args.image_size, args.seed, args.num_workers)
