"""A few driving scenes in a temporary folder, drawn once for all tests of a process."""

import functools
import tempfile
from pathlib import Path

from visdet.datasets import make_driving_scenes

SMALL = dict(num_train=3, num_val=2, num_test=2, num_frames=8, image_size=(48, 128))


@functools.cache
def driving_scenes() -> str:
    return str(
        make_driving_scenes(
            Path(tempfile.mkdtemp(prefix="visdet-driving-")) / "scenes", **SMALL, num_workers=1
        )
    )
