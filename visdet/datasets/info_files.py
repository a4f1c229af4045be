"""Files of frame records, which are called infos. visdet writes a format of its own and reads published pickles, too.

An info is a dict of numbers, strings, lists, dicts and numpy arrays (docs/driving_data.md lists the keys). visdet's
file is one uncompressed ``.npz``, in which every info is a pickle of its own. A frame is decoded only when it is read,
so that a data set of 28 000 frames needs little memory in worker processes. Pickles are read without running any code
from them.
"""

import io
import json
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from mmengine import fileio

from visdet.checks.array_files import DAMAGED
from visdet.errors import InvalidInputError, InvalidTypeError, reading
from visdet.files.writing import written_whole
from visdet.restricted_load import load_numpy_pickle

from .frame_records import value_of

_FORMAT = "visdet-infos-2"
FrameKey = tuple[int, str, bool, str]


@contextmanager
def _of_plain_types(what: str) -> Iterator[None]:
    """Make errors on a pickle in the block messages on what it is of."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise InvalidInputError(f"{what} cannot be read: {error}") from error


class InfoTable(Sequence):
    """A sequence of infos that decodes an info when it is read. Every ``table[i]`` is a new dict.

    Args:
        content: uint8, the pickles of all infos one after another.
        ends: int64 [n], the position at which the pickle of each info ends.
        frame_keys: the key of each info, so that frames can be sorted without decoding them.
        file: the info file, for messages.
    """

    def __init__(
        self, content: np.ndarray, ends: np.ndarray, frame_keys: list[FrameKey], file: str | Path
    ) -> None:
        self._content = content
        self._ends = ends
        self.frame_keys = frame_keys
        self._file = file

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int | slice) -> Any:
        place = range(len(self))[index]
        if isinstance(place, range):
            return [self[i] for i in place]
        start = self._ends[place - 1] if place else 0
        with _of_plain_types(f"frame {place} of info file {self._file}"):
            return load_numpy_pickle(io.BytesIO(self._content[start : self._ends[place]].tobytes()))


def frame_keys(infos: Sequence[dict], file: str = "the infos") -> list[FrameKey]:
    """Return the (timestamp in us, scene token, whether there are no sweeps, token) of each info.

    The first frame of a scene has no sweeps.

    Args:
        infos: the frames.
        file: the file that they come from, for messages.

    Raises:
        ValueError: an info has no timestamp or scene token, or one that cannot be used.
    """
    if isinstance(infos, InfoTable):
        return infos.frame_keys
    keys = []
    for index, info in enumerate(infos):
        if not isinstance(info, dict):
            raise InvalidInputError(f"frame {index} of {file} must be a dict, got {type(info).__name__}")
        token = info.get("token")
        where = f"frame {token or index} of {file}"
        time, scene, sweeps = (value_of(info, name, where) for name in ("timestamp", "scene_token", "sweeps"))
        keys.append((time, scene, sweeps is not None and len(sweeps) == 0, str(token or "")))
    return keys


def save_infos(path: str | Path, infos: Iterable[dict], metadata: dict) -> None:
    """Write an info file.

    Args:
        path: the file, which must end with ``.npz``.
        infos: the frames.
        metadata: information on the data set, such as ``version``, in types of JSON.

    Raises:
        TypeError: an info holds a value of a type that the file cannot hold.
        ValueError: ``path`` does not end with ``.npz``, or an info has no usable ``timestamp`` or ``scene_token``.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise InvalidInputError(f"save_infos: path must end with .npz, got {path}")
    infos = list(infos)
    pickles: list[bytes] = []
    header = json.dumps({"format": _FORMAT, "metadata": metadata})
    keys = json.dumps(frame_keys(infos, str(path)))
    for index, info in enumerate(infos):
        try:
            pickles.append(pickle.dumps(info))
            load_numpy_pickle(io.BytesIO(pickles[-1]))
        except (pickle.PickleError, TypeError, AttributeError) as error:
            raise InvalidTypeError(
                f"frame {info.get('token') or index} of {path}: an info file holds numbers, text, lists, dicts and "
                f"arrays, but {error}"
            ) from error
    content = np.frombuffer(b"".join(pickles), dtype=np.uint8)
    ends = np.cumsum(list(map(len, pickles)), dtype=np.int64)
    with written_whole(path) as partial:
        np.savez(partial, content=content, ends=ends, header=header, frame_keys=keys)


def load_infos(path: str | Path) -> tuple[Sequence[dict], dict]:
    """Return the infos and the metadata of a file of visdet (``.npz``) or of a published pickle (``.pkl``).

    A pickle may contain numpy's arrays and scalars. Any other type or function is refused, and its code does not run.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not an info file, or its pickle contains a type that is not numpy's.
    """
    file_name = str(path)
    with reading(f"info file {path}"):
        file: Any = open(path, "rb") if Path(path).exists() else io.BytesIO(fileio.get(file_name))  # noqa: SIM115
    with file:
        if file_name.endswith(".npz"):
            return _load_npz(path, file)
        if not file_name.endswith((".pkl", ".pickle")):
            raise InvalidInputError(f"info file {path} must end with .npz or .pkl")
        with _of_plain_types(f"info file {path}"):
            loaded = load_numpy_pickle(file)
    match loaded:
        case {"infos": list() | tuple() as infos, "metadata": dict() as metadata}:
            return list(infos), metadata
    is_dict = isinstance(loaded, dict)
    found = {name: type(value) for name, value in loaded.items()} if is_dict else loaded
    raise InvalidInputError(
        f"info file {path} must hold a dict of infos (a list) and metadata (a dict), got {found!r:.200}"
    )


def _load_npz(path: str | Path, opened: BinaryIO) -> tuple[InfoTable, dict]:
    try:
        with np.load(opened, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            if header["format"] != _FORMAT:
                raise ValueError(
                    f"its format is {header['format']!r}, but this version reads {_FORMAT!r}; make it anew by "
                    "visdet prepare-nuscenes"
                )
            keys = [tuple(key) for key in json.loads(str(file["frame_keys"]))]
            return InfoTable(file["content"], file["ends"], keys, path), header["metadata"]
    except (KeyError, OSError, *DAMAGED) as error:
        raise InvalidInputError(f"info file {path} is not one of visdet's: {error}") from error


_MIN_INTERVAL_US = 1000  # Frames of a recording are farther apart, unless the time is in other units.
# What the median interval of a file is, unless the time is in other units.
_USUAL_INTERVALS_US = (10_000, 10_000_000)
_MAX_INTERVAL_US = 60_000_000  # Frames that are farther apart belong to two recordings of one name.


def sort_frames(infos: Sequence[dict], file: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the positions of the frames, scene after scene and each in order of time.

    The second array holds the number of the scene of each, and the third one its time in microseconds.

    Raises:
        ValueError: the file is empty, a frame has no token, scene or time, two frames have one token or one scene and
            time, or the times are not in microseconds.
    """
    keys = frame_keys(infos, file)
    if not keys:
        raise InvalidInputError(f"info file {file} holds no frames")
    counts = Counter(token for *_, token in keys if token)
    repeated = [token for token, count in counts.items() if count > 1]
    if repeated:  # Metrics tell frames apart by their tokens.
        raise InvalidInputError(
            f"info file {file}: several frames have the token {repeated[0]}. Recordings that are joined must have "
            "different tokens and scene tokens"
        )
    # Files without sweeps of points have empty lists in all frames of a scene.
    with_sweeps = {scene for _, scene, has_none, _ in keys if not has_none}
    scene_starts: dict[str, int] = {}
    for time, scene, *_ in keys:
        scene_starts[scene] = min(time, scene_starts.get(scene, time))

    def place(index: int) -> tuple[int, str, int]:
        # Scenes that two vehicles have recorded at the same time must not be interleaved.
        time, scene, *_ = keys[index]
        return scene_starts[scene], scene, time

    order = sorted(range(len(keys)), key=place)
    sorted_keys = [keys[index] for index in order]
    are_first = [False]
    gaps = []
    for (time_before, scene_before, *_), (time, scene, has_no_sweeps, _) in pairwise(sorted_keys):
        gap = time - time_before
        if scene == scene_before:
            gaps.append(gap)
            if not _MIN_INTERVAL_US <= gap <= _MAX_INTERVAL_US:
                raise InvalidInputError(
                    f"info file {file}: two frames of scene {scene} are {gap} us apart, at {time_before} and {time}. "
                    "timestamp must be in microseconds, and different recordings must have different scene tokens"
                )
        are_first.append(scene != scene_before or (has_no_sweeps and scene in with_sweeps))
    least, most = _USUAL_INTERVALS_US
    usual = np.median(gaps or [least])
    if not least <= usual <= most:
        raise InvalidInputError(
            f"info file {file}: the frames of a scene must be {least} to {most} us apart, got {usual:g} us (median). "
            "timestamp must be in microseconds"
        )
    times = np.array([time for time, *_ in sorted_keys], dtype=np.int64)
    return np.array(order), np.cumsum(are_first), times


def sequence_flags(scene_starts: np.ndarray, num_frames: int, split_num: Any) -> np.ndarray:
    """Return the number of the sequence of each frame, int64, counted from 0 without gaps."""
    frames = np.arange(num_frames)
    if split_num in (-1, "all"):
        return frames
    sizes = np.diff(scene_starts, append=num_frames)
    position = frames - np.repeat(scene_starts, sizes)
    return np.cumsum(position % np.repeat(-(-sizes // split_num), sizes) == 0) - 1
