"""Draw the synthetic driving scenes. Training draws them by itself if they are missing.

visdet make-driving-scenes data/driving_scenes
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "folder", nargs="?", default="data/driving_scenes", help="folder to write (default: %(default)s)"
    )
    parser.add_argument(
        "--num-train", type=int, default=160, help="number of training scenes (default: %(default)s)"
    )
    parser.add_argument(
        "--num-val", type=int, default=16, help="number of validation scenes (default: %(default)s)"
    )
    parser.add_argument(
        "--num-test", type=int, default=16, help="number of test scenes (default: %(default)s)"
    )
    parser.add_argument(
        "--num-frames", type=int, default=20, help="number of frames per scene (default: %(default)s)"
    )
    parser.add_argument(
        "--image-size",
        type=int,
        nargs=2,
        default=(96, 256),
        metavar=("H", "W"),
        help="height and width of an image in pixels (default: 96 256)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the scenes (default: %(default)s)")
    parser.add_argument("--num-workers", type=int, help="number of processes (default: one per core)")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from visdet.datasets import make_driving_scenes

    make_driving_scenes(
        args.folder,
        num_train=args.num_train,
        num_val=args.num_val,
        num_test=args.num_test,
        num_frames=args.num_frames,
        image_size=tuple(args.image_size),
        seed=args.seed,
        num_workers=args.num_workers,
    )
