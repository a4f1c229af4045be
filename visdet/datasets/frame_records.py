"""The keys of a frame's record in an info file, in one table, and the check of records against it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from visdet.checks.finite import check_finite
from visdet.errors import InvalidInputError, UserError
from visdet.structures.poses import pose_matrix

_AGENT_STEPS = 12  # in published files
# The words and the type of each kind of value. Rotations are also checked to be some.
_KINDS: dict[str, tuple[str, Any]] = {
    "text": ("text", str),
    "number": ("numbers", np.float64),
    "integer": ("integers", np.int64),
    "time": ("a whole number of microseconds", np.int64),
    "flag": ("bools", bool),
    "rotation": ("a quaternion (w, x, y, z) or matrix", np.float64),
    "cameras": ("a dict of cameras by name", Mapping),
    "lines": ("a dict of lists of lines [m, 2] by the number of the map class", Mapping),
    "list": ("a list", (list, tuple, np.ndarray)),
}


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
        return f"{_KINDS[self.kind][0]} {shapes}".rstrip() + boxes

    def read(self, record: Mapping[str, Any], where: str, num_boxes: int | None = None, of: str = "") -> Any:
        """Return the value in a record with its type and shape, or None if it is optional and not there.

        Raises:
            InvalidInputError: it is missing, or has another type or shape.
        """
        value, name = record.get(self.name), f"{where}: {self.name}{of}"
        if value is None or (isinstance(value, str) and not value):
            if self.beside is None or record.get(self.beside) is not None:
                raise InvalidInputError(f"{name} is missing; it must be {self.expected()}")
            return None
        fitting = self._fitting(value, num_boxes)
        if fitting is None:
            raise InvalidInputError(f"{name} must be {self.expected(num_boxes)}, got {_described(value)}")
        if self.kind == "rotation":
            _check_rotation(name, fitting)
        return fitting

    def _fitting(self, value: Any, num_boxes: int | None) -> Any:
        """Return the value as an array or a scalar, or None if its type or shape is another one."""
        kind = _KINDS[self.kind][1]
        if kind is Mapping or isinstance(kind, tuple):
            return value if isinstance(value, kind) else None
        try:
            array = np.asarray(value)
            array = np.asarray(array.tolist()) if array.dtype == object else array
        except ValueError:  # lists of unequal lengths
            return None
        if array.size and array.dtype.kind not in ("U" if kind is str else "biuf"):
            return None
        with np.errstate(invalid="ignore"):
            converted = array.astype(kind)
        if array.size and not np.array_equal(converted, array, equal_nan=array.dtype.kind == "f"):
            return None
        for shape in (self.shape, *self.other_shapes):
            if "n" in shape and not array.size and not num_boxes:  # An array of no boxes may have any shape.
                return converted.reshape([{"n": 0, "t": _AGENT_STEPS}.get(size, size) for size in shape])  # type: ignore
            wanted = tuple(num_boxes if size == "n" else size for size in shape)
            if len(shape) == array.ndim and all(
                size == found or not isinstance(size, int)
                for size, found in zip(wanted, array.shape, strict=True)
            ):
                return converted if array.ndim else converted.item()
        return None


def _shown(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _described(value: Any) -> str:
    is_array = isinstance(value, np.ndarray)
    return f"{_shown(value.shape)} of {value.dtype}" if is_array else f"{value!r:.60}"


def _check_rotation(name: str, given: np.ndarray) -> None:
    try:
        matrix = pose_matrix(np.zeros(3), given)[:3, :3]
    except UserError as error:  # of a quaternion that is zero or not finite
        raise InvalidInputError(f"{name}: {error}") from error
    if not (np.abs(matrix @ matrix.T - np.eye(3)).max() <= 0.02 and np.linalg.det(matrix) > 0):
        raise InvalidInputError(f"{name} must be a rotation (orthogonal, right-handed), got {given.tolist()}")


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
    key = _KEYS[name]
    value = key.read(info, where, num_boxes)
    if value is None or ("n" in key.shape and num_boxes is None and name != "gt_boxes"):
        return None
    if key.kind == "cameras":
        return {camera: _camera(values, where, camera) for camera, values in value.items()}
    if key.kind == "lines":
        return {label: _lines(lines, where, label) for label, lines in value.items()}
    if name.endswith("translation"):
        check_finite(where, **{name: value})
    return value


def _camera(given: Any, where: str, name: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{where}: camera {name} must be a dict, got {_described(given)}")
    values = {key.name: key.read(given, where, of=f" of {name}") for key in CAMERA_KEYS}
    check_finite(f"{where}: camera {name}", sensor2lidar_translation=values["sensor2lidar_translation"])
    matrix = values["cam_intrinsic"][:3, :3]
    if not np.isfinite(matrix).all() or abs(np.linalg.det(matrix)) < 1e-9:
        raise InvalidInputError(f"{where}: cam_intrinsic of {name} must be invertible, got {matrix.tolist()}")
    return {**given, **values}


def _lines(given: Any, where: str, label: Any) -> list[np.ndarray]:
    if not isinstance(label, int | np.integer) or not isinstance(given, list | tuple | np.ndarray):
        raise InvalidInputError(
            f"{where}: map_annos must be {_KEYS['map_annos'].expected()}, got {_described(label)}"
        )
    lines = []
    for number, line in enumerate(given):
        name = f"line {number} of map class {label} in map_annos"
        points = Key(name, "number", ("m", 2), (("m", 3),), beside=None).read({name: line}, where)
        if not len(points):
            raise InvalidInputError(f"{where}: {name} has no points")
        check_finite(where, **{name: points})
        lines.append(points)
    return lines
