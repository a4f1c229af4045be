"""A few driving scenes in a temporary folder, drawn once for all tests of a process."""

import functools
import tempfile
from pathlib import Path

from visdet.datasets import load_infos, make_driving_scenes

SMALL = dict(num_train=3, num_val=2, num_test=2, num_frames=8, image_size=(48, 128))


@functools.cache
def driving_scenes() -> str:
    return str(
        make_driving_scenes(
            Path(tempfile.mkdtemp(prefix="visdet-driving-")) / "scenes", **SMALL, num_workers=1
        )
    )


def driving_infos(folder: str | Path | None = None, split: str = "train") -> list[dict]:
    """Return the frames of a split, of ``driving_scenes`` where no folder is given."""
    return list(load_infos(Path(folder or driving_scenes()) / f"driving_infos_{split}.npz")[0])
