"""Draw the synthetic driving scenes. Training draws them by itself if they are missing.

python tools/make_driving_scenes.py data/driving_scenes
"""

import argparse

from visdet.command_line import check_installation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    arguments = vars(parser.parse_args())
    check_installation()
    from visdet.datasets import make_driving_scenes
    from visdet.engine import tool_session

    with tool_session():
        make_driving_scenes(**arguments | {"image_size": tuple(arguments["image_size"])})


if __name__ == "__main__":
    main()
