"""Transforms of the boxes, futures and maps of driving frames, and the packing of a frame for the model."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from visdet.checks.arguments import Above0, Names
from visdet.errors import InvalidInputError, UnknownNameError
from visdet.registry import TRANSFORMS
from visdet.structures import DrivingDataSample
from visdet.structures.polylines import (
    closed_orders,
    cut_to_region,
    is_closed,
    open_orders,
    resample,
    simplify_line,
)
from visdet.structures.poses import distance_in_plane, inverse_pose, moved_boxes, pose_in_plane, wrap_angle

from .base import BaseTransform, keep_rows

_PER_BOX_KEYS = (
    "gt_bboxes_3d",
    "gt_labels_3d",
    "gt_names",
    "gt_attributes",
    "instance_inds",
    "gt_agent_fut_trajs",
    "gt_agent_fut_masks",
)


@TRANSFORMS.register_module()
class BBoxRotation(BaseTransform):
    """Rotates a frame about the z axis of the lidar frame by ``aug_config['rotate_3d']`` radians.

    Boxes, velocities, futures of agents and of the vehicle, future boxes, map lines and points are rotated, and
    ``lidar2img`` and ``lidar2global`` are changed to match. The images stay as they are.

    Source: the name is Sparse4D's. Difference: in Sparse4D only boxes and matrices are rotated, so that they no longer
    agree with the map and the futures.
    """

    def transform(self, results: dict) -> dict:
        given = results.get
        angle = (given("aug_config") or {}).get("rotate_3d", 0.0)
        if not angle:
            return results
        if "gt_map_pts" in results or "vectors" in results:
            raise InvalidInputError("BBoxRotation must come before VectorizeMap: it turns map_annos")
        turn = pose_in_plane(angle)
        back = inverse_pose(turn)
        turn_xy = turn[:2, :2].T
        results["lidar2img"] = [matrix @ back for matrix in results["lidar2img"]]
        results["lidar2global"] = results["lidar2global"] @ back
        for boxes in (given("gt_bboxes_3d"), *given("fut_boxes", ())):
            if boxes is not None:
                boxes[:] = moved_boxes(boxes, turn)
        for key in ("gt_agent_fut_trajs", "gt_ego_fut_trajs"):
            if key in results:
                results[key] = results[key] @ turn_xy
        if "map_annos" in results:
            turned = {}
            for label, lines in results["map_annos"].items():
                turned[label] = [np.hstack([line[:, :2] @ turn_xy, line[:, 2:]]) for line in lines]
            results["map_annos"] = turned
        if "points" in results:
            places = results["points"][:, :2]
            places[:] = places @ turn_xy
        return results


@TRANSFORMS.register_module()
class CircleObjectRangeFilter(BaseTransform):
    """Drops boxes that are farther away in x and y than the distance of their class.

    Boxes of classes without a distance are dropped, too. A record without boxes, such as one of a test split, stays as
    it is.

    Args:
        class_dist_thred: the distance in metres of each class, or one for all classes.
    """

    def __init__(
        self,
        # Those of nuScenes' classes: five kinds of vehicles, barriers, three kinds of road users and cones.
        class_dist_thred: Sequence[float] | float = (52.5, 52.5, 52.5, 52.5, 52.5, 31.5, 42, 42, 42, 31.5),
    ) -> None:
        self.class_dist_thred = class_dist_thred

    def transform(self, results: dict) -> dict:
        if "gt_labels_3d" not in results:
            return results
        labels, boxes = results["gt_labels_3d"], results["gt_bboxes_3d"]
        distance = distance_in_plane(boxes)
        reach: Any = self.class_dist_thred
        if np.ndim(reach):  # The last number, which nothing is within, is that of classes without one.
            reach = np.array([*reach, -1.0])[np.minimum(labels, len(reach))]
        keep_rows(results, _PER_BOX_KEYS, (labels >= 0) & (distance <= reach))
        return results


@TRANSFORMS.register_module()
class InstanceNameFilter(BaseTransform):
    """Drops boxes whose class is not one of ``classes``.

    Args:
        classes: the names of the classes in the order of the labels. Only their number is used, because the data set
            has set the label of other classes to -1. By default they are all classes of the data set.
    """

    def __init__(self, classes: Names | None = None) -> None:
        self.classes = classes

    def transform(self, results: dict) -> dict:
        if "gt_labels_3d" not in results:
            return results
        labels = results["gt_labels_3d"]
        is_used = labels >= 0
        if self.classes is not None:
            is_used = is_used & (labels < len(self.classes))
        keep_rows(results, _PER_BOX_KEYS, is_used)
        return results


@TRANSFORMS.register_module()
class VectorizeMap(BaseTransform):
    """Cuts the map lines of ``map_annos`` {label: lines [n, 2]} to a region, and resamples or simplifies them.

    With ``permute``, the results are ``gt_map_labels`` int64 [m] and ``gt_map_pts`` float32
    [m, 2 * (sample_num - 1), sample_num, 2], all orders of points that draw the same line. A closed line, whose ends
    are equal within 1 mm, has an order for every starting point in both directions. An open line has two orders, and
    the others are filled with 1e5.

    Without ``permute``, the results are ``vectors``, an object array [m] of lines, and ``vector_labels`` int64 [m].

    Args:
        roi_size: width (x) and length (y) of the region around the vehicle. Of a line that reaches beyond, the parts
            inside are kept (0.5 m at least), and of a closed line of class 0, a crossing, the area inside (1 m² at
            least).
        normalize: give points as fractions of the region instead of metres.
        coords_dim: 2 or 3.
        simplify: simplify lines by up to 0.2 m (Douglas and Peucker).
        sample_num: number of points per line. Either this or ``simplify`` must be given.
        permute: whether all orders are given, see above. This needs ``sample_num``.

    Raises:
        ValueError: the arguments do not fit together.

    Source: the name and keywords are SparseDrive's. Difference: shapely is not used, and lines come from ``map_annos``.
    """

    def __init__(
        self,
        roi_size: tuple[Above0, Above0],
        normalize: bool,
        coords_dim: Literal[2, 3] = 2,
        simplify: bool = False,
        sample_num: int = -1,
        permute: bool = False,
    ) -> None:
        if simplify == (sample_num > 1) or (permute and simplify):
            raise InvalidInputError(
                "VectorizeMap: either simplify or sample_num > 1 must be given, and sample_num with permute, "
                f"got {simplify=}, {sample_num=} and {permute=}"
            )
        self.roi_size = np.array(roi_size, dtype=np.float64)
        self.normalize = normalize
        self.coords_dim = coords_dim
        self.sample_num = sample_num
        self.permute = permute

    def transform(self, results: dict) -> dict:
        if "map_annos" not in results:
            return results
        labels, lines = [], []
        for label, annotated in results["map_annos"].items():
            for line in annotated:
                whole = line[:, : self.coords_dim]
                for part in cut_to_region(whole, label == 0, self.roi_size):
                    labels.append(int(label))
                    lines.append(self._vectorize(part))
        numbers = np.array(labels, dtype=np.int64)
        if self.permute:
            shape = (len(lines), 2 * (self.sample_num - 1), self.sample_num, self.coords_dim)
            orders = [closed_orders(line) if is_closed(line) else open_orders(line) for line in lines]
            results["gt_map_labels"] = numbers
            results["gt_map_pts"] = np.array(orders, dtype=np.float32).reshape(shape)
        else:
            results["vectors"] = object_array(lines)
            results["vector_labels"] = numbers
        return results

    def _vectorize(self, line: np.ndarray) -> np.ndarray:
        line = resample(line, self.sample_num) if self.sample_num > 1 else simplify_line(line, 0.2)
        if self.normalize:
            line[:, :2] = (line[:, :2] + self.roi_size / 2) / (self.roi_size + 1e-5)
        return line


def object_array(items: Sequence[Any]) -> np.ndarray:
    """Return a 1-D object array of the items. Collating keeps it in one piece, whatever the sizes of the items."""
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


@TRANSFORMS.register_module()
class NuScenesSparse4DAdaptor(BaseTransform):
    """Converts a record to the names and tensors that Sparse4D and SparseDrive read.

    They are ``img``, a tensor [V, 3, H, W] of the images' dtype, ``projection_mat`` float32 [V, 4, 4], ``image_wh``
    float32 [V, 2], ``focal`` float32 [V], ``T_global`` and ``T_global_inv``, float64 [4, 4] arrays, ``instance_id``,
    and the ground truth as tensors, with yaws in [-pi, pi).

    Source: the name is Sparse4D's.
    """

    def transform(self, results: dict) -> dict:
        images = results["img"]
        sizes = {image.shape for image in images}
        if len(sizes) > 1:
            raise InvalidInputError(
                f"frame {results.get('token')}: images of all cameras must be of one size, got {sorted(sizes)}"
            )
        results["img"] = torch.from_numpy(np.stack([image.transpose(2, 0, 1) for image in images]))
        results["projection_mat"] = results["lidar2img"]
        results["image_wh"] = np.array(results["img_shape"])[:, 1::-1]
        if "cam_intrinsic" in results:
            results["focal"] = np.array(results["cam_intrinsic"])[:, 0, 0]
        pose = results["lidar2global"]
        results |= {"T_global": pose, "T_global_inv": inverse_pose(pose)}
        if "instance_inds" in results:
            results["instance_id"] = results["instance_inds"]
        if "gt_bboxes_3d" in results:
            boxes = results["gt_bboxes_3d"]
            boxes[:, 6] = wrap_angle(boxes[:, 6])
        if "fut_boxes" in results:
            results["fut_boxes"] = object_array(results["fut_boxes"])
        for key in (*_TENSOR_KEYS, "cam_intrinsic"):
            if key in results:
                dtype = np.int64 if "labels" in key else np.float32
                results[key] = torch.from_numpy(np.ascontiguousarray(results[key], dtype))
        if "gt_depth" in results:
            results["gt_depth"] = [torch.from_numpy(level) for level in results["gt_depth"]]
        return results


_TENSOR_KEYS = (
    "projection_mat",
    "image_wh",
    "focal",
    "gt_bboxes_3d",
    "gt_labels_3d",
    "gt_map_labels",
    "gt_map_pts",
    "gt_agent_fut_trajs",
    "gt_agent_fut_masks",
    "gt_ego_fut_trajs",
    "gt_ego_fut_masks",
    "gt_ego_fut_cmd",
    "ego_status",
)


@TRANSFORMS.register_module(name=["PackDrivingInputs", "Collect"])
class PackDrivingInputs(BaseTransform):
    """Returns ``dict(inputs=images [V, 3, H, W], data_samples=DrivingDataSample)``.

    Args:
        keys: the fields of the sample. By default they are those of DEFAULT_KEYS that the record has.
        meta_keys: the keys of the meta information, in addition to ALWAYS_META. Keys that the record lacks are left
            out. A key that is also among ``keys`` becomes meta information only.

    Raises:
        KeyError: the record lacks one of ``keys``.

    Source: the keywords are those of mmdet 2's Collect. This class is registered under that name, too.
    """

    DEFAULT_KEYS = (
        "timestamp",
        "gt_depth",
        *_TENSOR_KEYS,
        "gt_attributes",
        "fut_boxes",
        "vectors",
        "vector_labels",
    )

    ALWAYS_META = ("token", "scene_token", "ego2global_translation", "cam_names")

    def __init__(
        self,
        keys: Names | None = None,
        meta_keys: Names = ("T_global", "T_global_inv", "timestamp", "instance_id"),
    ) -> None:
        self.keys = keys
        self.meta_keys = tuple(dict.fromkeys([*meta_keys, *self.ALWAYS_META]))

    def transform(self, results: dict) -> dict:
        keys = self.keys
        if keys is None:
            keys = tuple(key for key in self.DEFAULT_KEYS if key in results)
        missing = [key for key in keys if key not in results]
        if missing:
            raise UnknownNameError(
                f"PackDrivingInputs: frame {results.get('token')} has no {', '.join(missing)}"
            )
        meta = {key: results[key] for key in self.meta_keys if key in results}
        fields = {key: results[key] for key in keys if key not in ("img", *meta)}
        return {"inputs": results["img"], "data_samples": DrivingDataSample(metainfo=meta, **fields)}
