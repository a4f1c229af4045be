"""Draw the driving scenes; training does it by itself where they are missing.

python tools/make_driving_scenes.py data/driving_scenes
"""

import argparse

from visdet.command_line import check_installation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default="data/driving_scenes", help="default: %(default)s")
    parser.add_argument("--num-train", type=int, default=160, help="scenes; default: %(default)s")
    parser.add_argument("--num-val", type=int, default=16, help="scenes; default: %(default)s")
    parser.add_argument("--num-frames", type=int, default=20, help="of a scene; default: %(default)s")
    parser.add_argument(
        "--image-size", type=int, nargs=2, default=(96, 256), metavar=("H", "W"), help="default: 96 256"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--num-workers", type=int, help="processes; default: one per core")
    arguments = vars(parser.parse_args())
    check_installation()
    from visdet.datasets import make_driving_scenes

    make_driving_scenes(**arguments | {"image_size": tuple(arguments["image_size"])})


if __name__ == "__main__":
    main()
