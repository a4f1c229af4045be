"""Make the anchors of a driving model by k-means over the frames of an info file. They are saved as float32 .npy files.

visdet make-anchors my_recording.py
visdet make-anchors data/infos/nuscenes_infos_train.npz --out-dir data/kmeans
visdet make-anchors data/driving_scenes --out-dir data/driving_scenes --det 128 --map 30 --plan 1 \\
    --max-distance 33

For a config, the training frames, the classes, the numbers of anchors and the files to write are those of the config,
and only --seed counts.

A folder instead of an info file is the folder of the driving scenes, which are drawn if they are missing. The files are
kmeans_det_N.npy [N, 11], kmeans_map_N.npy [N, 20, 2], kmeans_motion_K.npy [classes, K, 12, 2] and kmeans_plan_K.npy
[3, K, 6, 2]. If a number is 0, its file is not written.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visdet.checks.arguments import AtLeast0, Count, Positive, checked
from visdet.command_line import add_options

if TYPE_CHECKING:
    import numpy as np

    Maker = Callable[[int], np.ndarray]


_FRAMES = (".npz", ".pkl", ".pickle")  # the suffixes of info files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "infos",
        help="a config, the info file (.npz or .pkl) of the training frames, or the folder of driving scenes",
    )
    add_options(
        parser,
        out_dir=("data/kmeans", "folder to write"),
        det=(900, "number of box anchors"),
        map=(100, "number of polyline anchors"),
        motion=(6, "number of motion modes of each class"),
        plan=(6, "number of plan modes of each command"),
        points=(20, "number of points of a polyline"),
        max_distance=(55.0, "use boxes up to this distance in metres"),
        seed=(0, "seed of k-means"),
    )
    parser.add_argument(
        "--classes",
        nargs="+",
        help="names of the classes (default: those of nuScenes, or of the driving scenes)",
    )


def run(infos: str, out_dir: str, seed: int, **others: Any) -> None:
    """Run the command."""
    import numpy as np

    from visdet.engine import check_work_dir
    from visdet.engine.config.packaged import find_config
    from visdet.errors import UserError, add_hint
    from visdet.files.writing import written_whole

    suffix = Path(infos).suffix
    if suffix == ".py" or (suffix not in _FRAMES and find_config(infos) is not None):
        found = frames_of_config(infos)
    else:
        check_work_dir(Path(out_dir), "--out-dir")
        found = frames_of_file(Path(infos), out_dir, **others)
    source, frames, classes, points, reach, wanted = found
    maker_of = makers(frames, classes, points, reach, seed)
    for kind, number, file in wanted:
        path = Path(file)
        try:
            anchors = maker_of[kind](number).astype(np.float32)
        except UserError as error:
            add_hint(error, f"while making {path} from {source}")
            raise
        check_work_dir(path.parent, "the config's folder of anchors")
        with written_whole(path) as partial:
            np.save(partial, anchors)
        print(f"wrote anchors {list(anchors.shape)} from {len(frames)} frames to {path}")


@checked
def frames_of_file(
    path: Path,
    out_dir: str,
    det: Count,
    map: Count,
    motion: Count,
    plan: Count,
    points: Positive,
    max_distance: AtLeast0,
    classes: Sequence[str] | None,
) -> tuple:
    """Return the info file, its frames, the arguments of :func:`makers`, and each kind, number and file of anchors."""
    from visdet.datasets import load_infos
    from visdet.datasets.nuscenes_tables import NUSCENES_CLASSES

    known: Sequence[str] = NUSCENES_CLASSES
    if path.suffix not in _FRAMES:
        from visdet.datasets import make_driving_scenes
        from visdet.datasets.synthetic.driving_world import DRIVING_CLASSES

        path = make_driving_scenes(path) / "driving_infos_train.npz"
        known = DRIVING_CLASSES
    infos, _ = load_infos(path)
    numbers = {"det": det, "map": map, "motion": motion, "plan": plan}
    wanted = [
        (kind, number, Path(out_dir, f"kmeans_{kind}_{number}.npy"))
        for kind, number in numbers.items()
        if number
    ]
    return path, list(infos), classes or known, points, max_distance, wanted


def frames_of_config(given: str) -> tuple:
    """Return what :func:`frames_of_file` does for the training data and the model of a config."""
    import numpy as np

    from visdet.engine import UserError, dataset_config, load_config
    from visdet.engine.config.checks import section_of
    from visdet.engine.config.load import build_dataset

    cfg, _ = load_config(given)
    head = section_of(cfg.model, "head")
    settings = dataset_config(cfg, "train")
    dataset = build_dataset(cfg, "train", pipeline=[])
    if not hasattr(dataset, "get_info"):
        raise UserError(f"{given}: the data set {settings['type']} has no frames of several cameras")
    infos = list(map(dataset.get_info, range(len(dataset))))
    reach = 55.0
    for step in settings.get("pipeline", ()):
        if step["type"] == "CircleObjectRangeFilter" and "class_dist_thred" in step:
            reach = float(np.max(step["class_dist_thred"]))
    wanted = list(anchors_of_head(head))
    if not wanted:
        raise UserError(f"{given}: model.head names no files of anchors")
    points = section_of(section_of(head, "map_head"), "anchor_encoder").get("num_sample", 0)
    return dataset.ann_file, infos, dataset.CLASSES, points, reach, wanted


def anchors_of_head(head: dict) -> "Iterator[tuple[str, int, str]]":
    """Yield the kind, number and file of the anchors of the head of a config."""
    from visdet.engine.config.checks import section_of

    tasks = head.get("task_config") or {"with_det": True, "with_map": True, "with_motion_plan": True}

    def part_of(task: str) -> dict:
        return section_of(head, f"{task}_head") if tasks.get(f"with_{task}") else {}

    for kind, part in (("det", head if "instance_bank" in head else part_of("det")), ("map", part_of("map"))):
        bank = section_of(part, "instance_bank")
        file = bank.get("anchor")
        if isinstance(file, str):
            yield kind, bank["num_anchor"], file
    motion = part_of("motion_plan")
    for kind, modes in (("motion", "fut_mode"), ("plan", "ego_fut_mode")):
        file = motion.get(f"{kind}_anchor")
        if isinstance(file, str):
            yield kind, motion[modes], file


def makers(
    infos: "list[dict]", classes: "Sequence[str]", num_points: int, max_distance: float, seed: int
) -> "dict[str, Maker]":
    """Return the function that makes a number of anchors, for each kind of anchors."""
    from visdet.datasets.anchors import detection_anchors, map_anchors, motion_anchors, planning_anchors

    return {
        "det": partial(detection_anchors, infos, max_distance=max_distance, seed=seed),
        "map": partial(map_anchors, infos, num_points=num_points, seed=seed),
        "motion": partial(motion_anchors, infos, classes, max_distance=max_distance, seed=seed),
        "plan": partial(planning_anchors, infos, seed=seed),
    }
