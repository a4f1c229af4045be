"""Draw the synthetic shapes data set. Training draws it by itself if it is missing.

python tools/make_shapes.py data/shapes
"""

import argparse

from visdet.command_line import check_installation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    arguments = vars(parser.parse_args())
    check_installation()
    from visdet.datasets import make_shapes
    from visdet.engine import tool_session

    with tool_session():
        make_shapes(**arguments)


if __name__ == "__main__":
    main()
