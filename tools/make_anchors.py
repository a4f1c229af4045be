"""Make the anchors of a driving model by k-means over the frames of an info file. They are saved as float32 .npy files.

python tools/make_anchors.py data/infos/nuscenes_infos_train.npz --out-dir data/kmeans
python tools/make_anchors.py data/driving_scenes --out-dir data/driving_scenes --det 128 --map 30 --plan 1 \\
    --max-distance 33

A folder instead of an info file is the folder of the driving scenes, which are drawn if they are missing. The files are
kmeans_det_N.npy [N, 11], kmeans_map_N.npy [N, 20, 2], kmeans_motion_K.npy [classes, K, 12, 2] and kmeans_plan_K.npy
[3, K, 6, 2]. If a number is 0, its file is not written.
"""

import argparse
from pathlib import Path

from visdet.command_line import check_installation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "infos", help="the info file (.npz or .pkl) of the training frames, or the folder of driving scenes"
    )
    parser.add_argument("--out-dir", default="data/kmeans", help="folder to write (default: %(default)s)")
    parser.add_argument("--det", type=int, default=900, help="number of box anchors (default: %(default)s)")
    parser.add_argument(
        "--map", type=int, default=100, help="number of polyline anchors (default: %(default)s)"
    )
    parser.add_argument(
        "--motion", type=int, default=6, help="number of motion modes of each class (default: %(default)s)"
    )
    parser.add_argument(
        "--plan", type=int, default=6, help="number of plan modes of each command (default: %(default)s)"
    )
    parser.add_argument(
        "--points", type=int, default=20, help="number of points of a polyline (default: %(default)s)"
    )
    parser.add_argument(
        "--max-distance",
        type=float,
        default=55.0,
        help="use boxes up to this distance in metres (default: %(default)s)",
    )
    parser.add_argument(
        "--classes",
        nargs="+",
        help="names of the classes (default: those of nuScenes, or of the driving scenes)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of k-means (default: %(default)s)")
    args = parser.parse_args()
    check_installation()
    from visdet.engine import tool_session

    with tool_session():
        make(args)


def make(args: argparse.Namespace) -> None:
    """Write the anchors that the arguments ask for."""
    import numpy as np

    from visdet.datasets import load_infos
    from visdet.datasets.anchors import detection_anchors, map_anchors, motion_anchors, planning_anchors
    from visdet.datasets.nuscenes_tables import NUSCENES_CLASSES
    from visdet.engine import check_work_dir

    out_dir = Path(args.out_dir)
    check_work_dir(out_dir, "--out-dir")
    path, classes = Path(args.infos), args.classes or NUSCENES_CLASSES
    if path.suffix not in (".npz", ".pkl", ".pickle"):
        from visdet.datasets import make_driving_scenes
        from visdet.datasets.synthetic.driving_world import DRIVING_CLASSES

        path = make_driving_scenes(path) / "driving_infos_train.npz"
        classes = args.classes or DRIVING_CLASSES
    infos = list(load_infos(path)[0])
    makers = {
        "det": lambda n: detection_anchors(infos, n, args.max_distance, args.seed),
        "map": lambda n: map_anchors(infos, n, args.points, args.seed),
        "motion": lambda n: motion_anchors(infos, classes, n, args.max_distance, args.seed),
        "plan": lambda n: planning_anchors(infos, n, args.seed),
    }
    for name, anchors_of in makers.items():
        number = getattr(args, name)
        if number:
            anchors = anchors_of(number).astype(np.float32)
            np.save(out_dir / f"kmeans_{name}_{number}.npy", anchors)
            print(
                f"wrote anchors {list(anchors.shape)} from {len(infos)} frames to "
                f"{out_dir / f'kmeans_{name}_{number}.npy'}"
            )


if __name__ == "__main__":
    main()
