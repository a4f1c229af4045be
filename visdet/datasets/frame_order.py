"""The order of frames: scene after scene, each in order of time, and the sequences that scenes are cut into."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from visdet.errors import InvalidInputError

from .info_files import frame_keys, frame_tokens

_MIN_INTERVAL_US = 1000  # Frames of a recording are farther apart, unless the time is in other units.
_MAX_INTERVAL_US = 60_000_000  # Frames that are farther apart belong to two recordings of one name.


def sort_frames(infos: Sequence[dict], file: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the frames, scene after scene and each in order of time, and the scene number of each.

    Raises:
        ValueError: the file is empty, a frame has no token, scene or time, two frames have one token or one scene and
            time, or the times are not in microseconds.
    """
    keys = frame_keys(infos, file)
    if not keys:
        raise InvalidInputError(f"info file {file} holds no frames")
    repeated = [token for token, count in Counter(frame_tokens(infos)).items() if count > 1]
    if repeated:  # Metrics tell frames apart by their tokens.
        raise InvalidInputError(
            f"info file {file}: several frames have the token {repeated[0]}. Recordings that are joined must have "
            "different tokens and scene tokens"
        )
    # Files without sweeps of points have empty lists in all frames of a scene.
    with_sweeps = {scene for _, scene, has_none in keys if not has_none}
    scene_starts: dict[str, int] = {}
    for time, scene, _ in keys:
        scene_starts[scene] = min(time, scene_starts.get(scene, time))
    # Scenes that two vehicles have recorded at the same time must not be interleaved.
    order = sorted(range(len(keys)), key=lambda i: (scene_starts[keys[i][1]], keys[i][1], keys[i][0]))
    scenes = np.zeros(len(order), dtype=np.int64)
    for position, (before, here) in enumerate(pairwise(order), start=1):
        (time_before, scene_before, _), (time, scene, has_no_sweeps) = keys[before], keys[here]
        gap = time - time_before
        if scene == scene_before and not _MIN_INTERVAL_US <= gap <= _MAX_INTERVAL_US:
            raise InvalidInputError(
                f"info file {file}: two frames of scene {scene} are {gap} us apart, at {time_before} and {time}. "
                "timestamp must be in microseconds, and different recordings must have different scene tokens"
            )
        is_first = scene != scene_before or (has_no_sweeps and scene in with_sweeps)
        scenes[position] = scenes[position - 1] + is_first
    return np.array(order, dtype=np.int64), scenes


def sequence_flags(scenes: np.ndarray, split_num: Any) -> np.ndarray:
    """Return the number of the sequence of each frame, int64, counted from 0 without gaps."""
    if split_num in (-1, "all"):
        return np.arange(len(scenes))
    flags, number = np.empty_like(scenes), 0
    for frames in np.split(np.arange(len(scenes)), np.flatnonzero(np.diff(scenes)) + 1):
        length = math.ceil(len(frames) / split_num)
        for start in range(0, len(frames), length):
            flags[frames[start : start + length]] = number
            number += 1
    return flags
