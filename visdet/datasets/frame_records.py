"""The keys of a frame's record in an info file, in one table, and the check of records against it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from visdet.errors import InvalidInputError, UserError
from visdet.structures.poses import pose_matrix

_AGENT_STEPS = 12  # in published files
_MAX_TIMESTAMP_US = 10**17  # the year 5138; larger numbers are nanoseconds


@dataclass(frozen=True)
class Key:
    """What a record holds under a name.

    Attributes:
        name: the key.
        kind: 'text', 'number', 'integer', 'time', 'flag', 'rotation', 'cameras', 'lines' or 'list'.
        shape: the shape of an array, in which a letter stands for any size. ``n`` is the number of boxes.
        other_shapes: shapes that are accepted, too.
        beside: the key whose presence makes this one necessary. ``None`` means that every record must have it, and
            an empty text that it is optional.
    """

    name: str
    kind: str
    shape: tuple[int | str, ...] = ()
    other_shapes: tuple[tuple[int | str, ...], ...] = ()
    beside: str | None = ""

    def expected(self, num_boxes: int | None = None) -> str:
        """Return the kind and the shape in words, for messages."""
        shapes = " or ".join(_shown(shape) for shape in (self.shape, *self.other_shapes) if shape)
        boxes = f" for n = {num_boxes} boxes" if num_boxes is not None and "n" in self.shape else ""
        return f"{_WORDS[self.kind]} {shapes}".rstrip() + boxes


_WORDS = {
    "text": "text",
    "number": "numbers",
    "integer": "integers",
    "time": "a whole number of microseconds",
    "flag": "bools",
    "rotation": "a quaternion (w, x, y, z) or matrix",
    "cameras": "a dict of cameras by name",
    "lines": "a dict of lists of lines [m, 2] by the number of the map class",
    "list": "a list",
}

CAMERA_KEYS = (
    Key("data_path", "text", beside=None),
    Key("sensor2lidar_rotation", "rotation", (3, 3), ((4,),), beside=None),
    Key("sensor2lidar_translation", "number", (3,), beside=None),
    Key("cam_intrinsic", "number", (3, 3), ((3, 4), (4, 4)), beside=None),
)
FRAME_KEYS = (
    Key("token", "text", beside=None),
    Key("scene_token", "text", beside=None),
    Key("timestamp", "time", beside=None),
    Key("cams", "cameras", beside=None),
    Key("lidar2ego_translation", "number", (3,), beside=None),
    Key("lidar2ego_rotation", "rotation", (4,), ((3, 3),), beside=None),
    Key("ego2global_translation", "number", (3,), beside=None),
    Key("ego2global_rotation", "rotation", (4,), ((3, 3),), beside=None),
    Key("lidar_path", "text"),
    Key("sweeps", "list"),
    Key("map_location", "text"),
    Key("gt_boxes", "number", ("n", 7), (("n", 9),), beside="gt_names"),
    Key("gt_names", "text", ("n",), beside="gt_boxes"),
    Key("gt_velocity", "number", ("n", 2)),
    Key("gt_attributes", "text", ("n",)),
    Key("instance_inds", "integer", ("n",)),
    Key("num_lidar_pts", "integer", ("n",)),
    Key("num_radar_pts", "integer", ("n",)),
    Key("valid_flag", "flag", ("n",)),
    Key("gt_agent_fut_trajs", "number", ("n", "t", 2), beside="gt_agent_fut_masks"),
    Key("gt_agent_fut_masks", "number", ("n", "t"), beside="gt_agent_fut_trajs"),
    Key("gt_ego_fut_trajs", "number", ("s", 2), beside="gt_ego_fut_masks"),
    Key("gt_ego_fut_masks", "number", ("s",), beside="gt_ego_fut_trajs"),
    Key("gt_ego_fut_cmd", "number", (3,), beside="gt_ego_fut_trajs"),
    Key("ego_status", "number", (10,)),
    Key("map_annos", "lines"),
)
_KEYS = {key.name: key for key in FRAME_KEYS}


def check_frame(info: Mapping[str, Any], file: str, index: int) -> dict[str, Any]:
    """Return the record with its values as arrays of the shapes that FRAME_KEYS names, and gt_boxes [n, 7].

    Without ``gt_velocity``, the velocities are the last two columns of ``gt_boxes`` [n, 9], or else NaN. Keys that
    FRAME_KEYS does not name are kept as they are, and optional keys that are None are left out.

    Args:
        info: the record, which is not changed.
        file: the info file, for messages.
        index: the position of the record in the file, for messages about a record without a token.

    Raises:
        InvalidInputError: a key is missing, or its value cannot be used. The message names key, record and file.
    """
    if not isinstance(info, Mapping):
        raise InvalidInputError(f"frame {index} of {file} must be a dict, got {_described(info)}")
    token = info.get("token")
    where = f"frame {token if isinstance(token, str) and token else index} of {file}"
    record = {name: value for name, value in info.items() if name not in _KEYS}
    boxes = value_of(info, "gt_boxes", where)
    num_boxes = None if boxes is None else len(boxes)
    for name in _KEYS:
        value = boxes if name == "gt_boxes" else value_of(info, name, where, num_boxes)
        if value is not None:
            record[name] = value
    for path in ("gt_agent_fut", "gt_ego_fut"):
        steps, masks = record.get(f"{path}_trajs"), record.get(f"{path}_masks")
        if steps is not None and masks is not None and steps.shape[:-1] != masks.shape:
            raise InvalidInputError(
                f"{where}: {path}_masks must be {_shown(steps.shape[:-1])} for {path}_trajs {_shown(steps.shape)}, got "
                f"{_shown(masks.shape)}"
            )
    if boxes is not None:
        record["gt_boxes"] = boxes[:, :7]
        if "gt_velocity" not in record:
            record["gt_velocity"] = boxes[:, 7:] if boxes.shape[1] == 9 else np.full((len(boxes), 2), np.nan)
        if np.isinf(record["gt_velocity"]).any():
            raise InvalidInputError(f"{where} has infinite gt_velocity; it is NaN where it is unknown")
    return record


def value_of(info: Mapping[str, Any], name: str, where: str, num_boxes: int | None = None) -> Any:
    """Return the checked value of one key of FRAME_KEYS, or None if the record does not have this optional key.

    Args:
        info: the record.
        name: the key.
        where: the words for the record in messages, such as 'frame a of infos.npz'.
        num_boxes: the number of boxes of the record, or None if it has none.
    """
    value = _checked(_KEYS[name], info, where, num_boxes)
    is_of_no_boxes = "n" in _KEYS[name].shape and num_boxes is None and name != "gt_boxes"
    return None if is_of_no_boxes else value


def _checked(
    key: Key, info: Mapping[str, Any], where: str, num_boxes: int | None = None, camera: str = ""
) -> Any:
    value = info.get(key.name)
    name = f"{key.name} of {camera}" if camera else key.name
    if value is None:
        if key.beside is None or info.get(key.beside) is not None:
            raise InvalidInputError(f"{where}: {name} is missing; it must be {key.expected()}")
        return None
    if key.kind in _READERS:
        return _READERS[key.kind](key, value, where)
    if key.kind == "text" and not key.shape:
        if not isinstance(value, str) or (not value and key.beside is None):
            raise InvalidInputError(f"{where}: {name} must be text, got {_described(value)}")
        return str(value) or None
    array = _array(key, value)
    shape = None if array is None else _fitting_shape(key, array, num_boxes)
    if array is None or shape is None:
        raise InvalidInputError(f"{where}: {name} must be {key.expected(num_boxes)}, got {_described(value)}")
    array = array.reshape(shape)
    if key.kind == "rotation":
        return _checked_rotation(name, array, where)
    if key.name.endswith("translation") and not np.isfinite(array).all():
        raise InvalidInputError(f"{where} has a pose that is NaN or infinite: {name} is {array}")
    if key.name == "cam_intrinsic":
        _check_invertible(name, array[:3, :3], where)
    return array


def _array(key: Key, value: Any) -> np.ndarray | None:
    """Return the value as an array of the type of its key, or None if that is not possible."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        return None
    if key.kind == "text":
        if array.dtype == object and all(isinstance(item, str) for item in array.flat):
            array = array.astype(str)
        return array.astype(str) if array.dtype.kind in "US" or not array.size else None
    if array.dtype == object and all(isinstance(item, (int, float, np.number)) for item in array.flat):
        array = np.array(array.tolist())
    if array.dtype.kind not in "biuf" and array.size:
        return None
    if key.kind in ("number", "rotation"):
        return array.astype(np.float64)
    if array.dtype.kind in "uf" and (np.abs(array) < 2**63).all() and (array == np.round(array)).all():
        array = array.astype(np.int64)
    if array.dtype.kind not in "bi" and array.size:
        return None
    if key.kind == "flag":
        return array.astype(bool) if np.isin(array, (0, 1)).all() else None
    return array.astype(np.int64)


def _fitting_shape(key: Key, array: np.ndarray, num_boxes: int | None) -> tuple[int, ...] | None:
    """Return the shape that an array of this key has, or None if it has another one.

    An array without boxes may have any shape.
    """
    for shape in (key.shape, *key.other_shapes):
        if "n" in shape and not array.size and num_boxes in (None, 0):
            return tuple({"n": 0, "t": _AGENT_STEPS}.get(size, size) for size in shape)  # type: ignore
        if len(shape) != array.ndim:
            continue
        wanted = tuple(num_boxes if size == "n" else size for size in shape)
        if all(
            size == found or not isinstance(size, int)
            for size, found in zip(wanted, array.shape, strict=True)
        ):
            return array.shape
    return None


def _checked_rotation(name: str, array: np.ndarray, where: str) -> np.ndarray:
    """Return a quaternion [4] or a matrix [3, 3] if it is a rotation."""
    try:
        matrix = pose_matrix(np.zeros(3), array)[:3, :3]
    except UserError as error:  # of a quaternion that is zero or not finite
        raise InvalidInputError(f"{where}: {name}: {error}") from error
    _check_invertible(name, matrix, where)
    if np.abs(matrix @ matrix.T - np.eye(3)).max() > 0.02 or np.linalg.det(matrix) < 0:
        raise InvalidInputError(
            f"{where}: {name} must be a rotation (orthogonal, right-handed), got\n{array}"
        )
    return array


def _check_invertible(name: str, matrix: np.ndarray, where: str) -> None:
    if not np.isfinite(matrix).all() or abs(np.linalg.det(matrix)) < 1e-9:
        raise InvalidInputError(f"{where}: {name} must be invertible, got\n{matrix}")


def _time(key: Key, value: Any, where: str) -> int:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    is_whole = isinstance(value, (int, np.integer)) or (is_number and float(value).is_integer())
    if not is_number or not is_whole or value > _MAX_TIMESTAMP_US:
        unit = "; are these nanoseconds?" if is_whole else "; are these seconds?" if is_number else ""
        raise InvalidInputError(
            f"{where}: {key.name} must be {key.expected()}, got {_described(value)}{unit}"
        )
    return int(value)


def _cameras(key: Key, value: Any, where: str) -> dict[str, dict]:
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        raise InvalidInputError(f"{where}: cams must be {key.expected()}, got {_described(value)}")
    cameras = {}
    for name, camera in value.items():
        if not isinstance(camera, Mapping):
            raise InvalidInputError(f"{where}: camera {name} must be a dict, got {_described(camera)}")
        values = {key.name: _checked(key, camera, where, camera=name) for key in CAMERA_KEYS}
        cameras[name] = {**camera, **values}
    return cameras


def _lines(key: Key, value: Any, where: str) -> dict[int, list[np.ndarray]]:
    if not isinstance(value, Mapping) or not all(
        isinstance(label, (int, np.integer))
        and label is not True
        and isinstance(lines, (list, tuple, np.ndarray))
        for label, lines in value.items()
    ):
        raise InvalidInputError(f"{where}: map_annos must be {key.expected()}, got {_described(value)}")
    checked: dict[int, list[np.ndarray]] = {}
    for label, lines in value.items():
        checked[int(label)] = []
        for number, line in enumerate(lines):
            points = _array(_POINTS, line)
            if points is None or points.ndim != 2 or points.shape[1] not in (2, 3) or not len(points):
                problem = f"must be points [m, 2], got {_described(line)}"
            elif not np.isfinite(points).all():
                problem = "is NaN or infinite"
            else:
                checked[int(label)].append(points)
                continue
            raise InvalidInputError(f"{where}: line {number} of map class {label} in map_annos {problem}")
    return checked


def _list(key: Key, value: Any, where: str) -> Any:
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise InvalidInputError(f"{where}: {key.name} must be a list, got {_described(value)}")
    return value


_POINTS = Key("points", "number", ("m", 2))
_READERS: dict[str, Callable[[Key, Any, str], Any]] = {
    "time": _time,
    "cameras": _cameras,
    "lines": _lines,
    "list": _list,
}


def _shown(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _described(value: Any) -> str:
    """Return a value in a few words."""
    if isinstance(value, np.ndarray):
        return f"{_shown(value.shape)} of {value.dtype}"
    if isinstance(value, (list, tuple)) and value:
        try:
            array = np.asarray(value)
        except ValueError:
            return "lists of unequal lengths"
        return f"{_shown(array.shape)} of {array.dtype}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
