"""The keys of a frame's record in an info file, in one table, and the check of records against it."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from visdet.checks.finite import check_finite
from visdet.errors import InvalidInputError
from visdet.structures.poses import pose_matrix

_AGENT_STEPS = 12  # in published files
_WORDS = {str: "text", float: "numbers", int: "integers", bool: "bools", dict: "a dict", list: "a list"}


@dataclass(frozen=True)
class Key:
    """What a record holds under a name.

    Attributes:
        name: the key. Under one that ends with ``_rotation`` are quaternions (w, x, y, z) and matrices [3, 3].
        dtype: the type of a value or of an array: ``str``, ``float``, ``int``, ``bool``, ``dict`` or ``list``.
        shapes: the shapes that an array may have, such as ``[n, 7] or [n, 9]``, in which a letter stands for any size.
            ``n`` is the number of boxes. An empty text is that of a single value.
        beside: the key whose presence makes this one necessary. ``None`` means that every record must have it, and
            an empty text that it is optional.
        is_finite: whether no number may be NaN or infinite.
        flags: "any" if each number must be 0 or 1, and "one" if exactly one of them must be 1.
    """

    name: str
    dtype: type
    shapes: str = ""
    beside: str | None = ""
    is_finite: bool = False
    flags: str = ""

    def expected(self) -> str:
        """Return the type and the shape in words."""
        return f"{_WORDS[self.dtype]} {self.shapes}".rstrip()

    def read(self, record: Mapping[str, Any], where: str, sizes: dict | None = None, of: str = "") -> Any:
        """Return the value in a record with its type and shape, or None if it is optional and not there.

        Args:
            record: the record.
            where: the words for the record in messages. of: more words, for the name.
            sizes: what the letters of shapes stand for. That of a new letter is added.

        Raises:
            InvalidInputError: it is missing, has another type or shape, or is not finite.
        """
        own_name = self.name
        name = f"{where}: {own_name}{of}"
        value = record.get(own_name)
        if value is None or (isinstance(value, str) and not value):
            if self.beside is None or record.get(self.beside) is not None:
                raise InvalidInputError(f"{name} is missing; it must be {self.expected()}")
            return None
        sizes = {} if sizes is None else sizes
        fitting = self._fitting(value, sizes)
        if fitting is None:
            known = ", ".join(
                f"{letter} = {size}" for letter, size in sizes.items() if isinstance(letter, str)
            )
            known = known and f" with {known}"
            raise InvalidInputError(f"{name} must be {self.expected()}{known}, got {_described(value)}")
        if own_name.endswith("_rotation") and not _is_rotation(fitting):
            raise InvalidInputError(
                f"{name} must be a quaternion or a rotation matrix, got {fitting.tolist()}"
            )
        if self.is_finite:
            check_finite(where, **{f"{own_name}{of}": fitting})
        flags = self.flags
        if flags and not (((fitting == 0) | (fitting == 1)).all() and (flags == "any" or fitting.sum() == 1)):
            rest = ", and exactly one of them 1" if flags == "one" else ""
            raise InvalidInputError(f"{name} must be 0 or 1{rest}, got {fitting.tolist()}")
        return fitting

    def _fitting(self, value: Any, sizes: dict) -> Any:
        """Return the value as an array or a scalar, or None if its type or shape is another one."""
        dtype = self.dtype
        if dtype in (dict, list):
            kinds: Any = Mapping if dtype is dict else (list, tuple, np.ndarray)
            return value if isinstance(value, kinds) else None
        try:
            array = np.asarray(value)
            array = np.asarray(array.tolist()) if array.dtype == object else array
        except ValueError:  # lists of unequal lengths
            return None
        with np.errstate(invalid="ignore"):
            kind = array.dtype.kind
            is_number = kind in "biuf"
            is_empty = not array.size
            converted = array.astype(dtype) if is_number or is_empty else array
        has_kind = kind == "U" if dtype is str else is_number
        is_same = has_kind and np.array_equal(converted, array, equal_nan=is_number)
        for shape in map(_sizes_in, self.shapes.split(" or ")):
            if "n" in shape and is_empty and not sizes.get("n"):  # That of no boxes may have any shape.
                sizes["n"] = 0
                return converted.reshape([{"n": 0, "t": _AGENT_STEPS}.get(size, size) for size in shape])  # type: ignore
            wanted = [sizes.get(size, size) for size in shape]
            fits = is_same and len(shape) == array.ndim
            if fits and all(isinstance(n, str) or n == m for n, m in zip(wanted, array.shape, strict=True)):
                sizes.update(zip(shape, array.shape, strict=True))
                return converted if array.ndim else converted.item()
        return None


@functools.cache
def _sizes_in(shape: str) -> tuple[int | str, ...]:
    """Return the sizes in a shape such as ``[n, 7]``."""
    return tuple(int(size) if size.isdigit() else size for size in re.findall(r"\w+", shape))


def _described(value: Any) -> str:
    is_array = isinstance(value, np.ndarray)
    return f"{list(value.shape)} of {value.dtype}" if is_array else f"{value!r:.60}"


def _is_rotation(given: np.ndarray) -> bool | np.bool_:
    if given.ndim == 1:
        return 1e-8 < np.linalg.norm(given) < np.inf
    is_orthogonal = np.allclose(given @ given.T, np.eye(3), rtol=0, atol=0.02)
    return is_orthogonal and np.linalg.det(given) > 0


CAMERA_KEYS = (
    Key("data_path", str, beside=None),
    Key("sensor2lidar_rotation", float, "[3, 3] or [4]", beside=None),
    Key("sensor2lidar_translation", float, "[3]", beside=None, is_finite=True),
    Key("cam_intrinsic", float, "[3, 3] or [3, 4] or [4, 4]", beside=None, is_finite=True),
)
FRAME_KEYS = (
    Key("token", str, beside=None),
    Key("scene_token", str, beside=None),
    Key("timestamp", int, beside=None),
    Key("cams", dict, beside=None),
    Key("lidar2ego_translation", float, "[3]", beside=None, is_finite=True),
    Key("lidar2ego_rotation", float, "[4] or [3, 3]", beside=None),
    Key("ego2global_translation", float, "[3]", beside=None, is_finite=True),
    Key("ego2global_rotation", float, "[4] or [3, 3]", beside=None),
    Key("lidar_path", str),
    Key("sweeps", list),
    Key("map_location", str),
    Key("gt_boxes", float, "[n, 7] or [n, 9]", beside="gt_names"),
    Key("gt_names", str, "[n]", beside="gt_boxes"),
    Key("gt_velocity", float, "[n, 2]"),
    Key("gt_attributes", str, "[n]"),
    Key("instance_inds", int, "[n]"),
    Key("num_lidar_pts", int, "[n]"),
    Key("num_radar_pts", int, "[n]"),
    Key("valid_flag", bool, "[n]"),
    Key("gt_agent_fut_trajs", float, "[n, t, 2]", beside="gt_agent_fut_masks"),
    Key("gt_agent_fut_masks", float, "[n, t]", beside="gt_agent_fut_trajs", flags="any"),
    Key("gt_ego_fut_trajs", float, "[s, 2]", beside="gt_ego_fut_masks", is_finite=True),
    Key("gt_ego_fut_masks", float, "[s]", beside="gt_ego_fut_trajs", flags="any"),
    Key("gt_ego_fut_cmd", float, "[3]", beside="gt_ego_fut_trajs", flags="one"),
    Key("ego_status", float, "[10]", is_finite=True),
    Key("map_annos", dict),
)
_KEYS = {key.name: key for key in FRAME_KEYS}


def check_frame(info: Mapping[str, Any], file: str, index: int) -> dict[str, Any]:
    """Return the record with its values as arrays of the shapes that FRAME_KEYS names, and gt_boxes [n, 9].

    The last two columns are ``gt_velocity``. Without it, they are those of the file's ``gt_boxes`` [n, 9], or else NaN.
    Keys that FRAME_KEYS does not name are kept as they are, and optional keys that are None are left out.

    Args:
        info: the record, which is not changed.
        file: the info file, for messages.
        index: the position of the record in the file, for messages about a record without a token.

    Raises:
        InvalidInputError: a key is missing, or its value cannot be used. The message names key, record and file.
    """
    token = info.get("token")
    where = f"frame {token if isinstance(token, str) and token else index} of {file}"
    sizes: dict = {}
    read = {**info, **{name: value_of(info, name, where, sizes) for name in _KEYS}}
    record = {name: value for name, value in read.items() if name not in _KEYS or value is not None}
    if "gt_boxes" in record:
        boxes = record["gt_boxes"]
        unknown = np.full((len(boxes), 2), np.nan)
        velocity = record.get("gt_velocity", boxes[:, 7:])
        if np.isinf(velocity).any():
            raise InvalidInputError(f"{where} has infinite gt_velocity; it is NaN where it is unknown")
        record["gt_boxes"] = np.concatenate([boxes[:, :7], velocity, unknown], axis=1)[:, :9]
    return record


def value_of(info: Mapping[str, Any], name: str, where: str, sizes: dict | None = None) -> Any:
    """Return the checked value of one key of FRAME_KEYS, or None if the record does not have this optional key.

    Args:
        info: the record.
        name: the key.
        where: the words for the record in messages, such as 'frame a of infos.npz'.
        sizes: see :meth:`Key.read`.
    """
    value = _KEYS[name].read(info, where, sizes)
    read = {"cams": _camera, "map_annos": _lines}.get(name)
    if value is None or read is None:
        return value
    return {item: read(given, where, item) for item, given in value.items()}


def _camera(given: Any, where: str, name: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{where}: camera {name} must be a dict, got {_described(given)}")
    values = {key.name: key.read(given, where, of=f" of {name}") for key in CAMERA_KEYS}
    matrix = values["cam_intrinsic"][:3, :3]
    if abs(np.linalg.det(matrix)) < 1e-9:
        raise InvalidInputError(f"{where}: cam_intrinsic of {name} must be invertible, got {matrix.tolist()}")
    return {**given, **values}


def _lines(given: Any, where: str, label: Any) -> list[np.ndarray]:
    if not isinstance(label, int | np.integer) or not isinstance(given, list | tuple | np.ndarray):
        raise InvalidInputError(
            f"{where}: map_annos must have a list of lines for the number of a map class, got {_described(label)}"
        )
    lines = []
    for number, line in enumerate(given):
        name = f"line {number} of map class {label} in map_annos"
        key = Key(name, float, "[m, 2] or [m, 3]", beside=None, is_finite=True)
        points = key.read({name: line}, where)
        if not len(points):
            raise InvalidInputError(f"{where}: {name} must have points")
        lines.append(points)
    return lines


def lidar_to_global(info: dict) -> np.ndarray:
    """Return the pose [4, 4] of the lidar frame in the world."""
    lidar_to_ego = pose_matrix(info["lidar2ego_translation"], info["lidar2ego_rotation"])
    return pose_matrix(info["ego2global_translation"], info["ego2global_rotation"]) @ lidar_to_ego
