"""A few driving scenes in a temporary folder, drawn once for all tests of a process."""

import functools
import tempfile
from pathlib import Path

import numpy as np

from visdet.datasets import load_infos, make_driving_scenes
from visdet.structures.poses import pose_matrix

SMALL = dict(num_train=3, num_val=2, num_test=2, num_frames=8, image_size=(48, 128))


@functools.cache
def driving_scenes() -> str:
    return str(
        make_driving_scenes(
            Path(tempfile.mkdtemp(prefix="visdet-driving-")) / "scenes", **SMALL, num_workers=1
        )
    )


def lidar_pose(info: dict) -> np.ndarray:
    """Return the matrix [4, 4] from the lidar's frame to the world."""
    ego = pose_matrix(info["ego2global_translation"], info["ego2global_rotation"])
    return ego @ pose_matrix(info["lidar2ego_translation"], info["lidar2ego_rotation"])


def driving_infos(folder: str | Path | None = None, split: str = "train") -> list[dict]:
    """Return the frames of a split, of ``driving_scenes`` where no folder is given."""
    return list(load_infos(Path(folder or driving_scenes()) / f"driving_infos_{split}.npz")[0])
