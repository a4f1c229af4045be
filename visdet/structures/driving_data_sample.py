"""The sample of one frame of several cameras, with its ground truth and its predictions."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from mmengine.structures import BaseDataElement, InstanceData
from torch import Tensor

_OF_TRUE_INSTANCES = ("gt_bboxes_3d", "gt_labels_3d", "gt_agent_fut_", "gt_map_")
# The parts of the predictions that are not those of the boxes, by the names of the results.
_PART_OF = {
    "vectors": "pred_map",
    "scores": "pred_map",
    "labels": "pred_map",
    "planning_score": "pred_plan",
    "planning": "pred_plan",
    "final_planning": "pred_plan",
    "ego_period": "pred_plan",
    "ego_anchor_queue": "pred_plan",
}


class DrivingDataSample(BaseDataElement):
    """Cameras, ground truth, predictions and meta information of one frame.

    Lengths are in metres in the lidar frame. The meta information consists of ``token``, ``scene_token``, ``timestamp``
    (in seconds), ``T_global`` and its inverse ``T_global_inv`` [4, 4] (from the lidar frame to the world),
    ``ego2global_translation`` [3], ``cam_names`` [V] and ``instance_id`` [n], the track ids of the true boxes.

    Attributes:
        projection_mat: [V, 4, 4], from the lidar frame to the pixels of each camera. image_wh: [V, 2]. focal: [V].
        gt_bboxes_3d: [n, 9], centre, length, width, height, yaw and velocity (x, y). gt_labels_3d: [n].
        gt_agent_fut_trajs, gt_agent_fut_masks: [n, T, 2] and [n, T], the future steps of the boxes.
        gt_map_pts, gt_map_labels: [m, orders, points, 2] and [m], the map lines for training.
        vectors, vector_labels: m lines [points, 2] and [m], the map lines for metrics.
        gt_ego_fut_trajs, gt_ego_fut_masks, gt_ego_fut_cmd, ego_status: [T, 2], [T], [3] and [10], the future, the
            command and the status of the ego vehicle.
        gt_depth: [V, h, w] for each level. fut_boxes: the true boxes of each future step.
        pred_instances_3d: ``boxes_3d`` [n, 9 or 10], ``scores_3d``, ``labels_3d`` and ``instance_ids`` [n]. With motion
            also ``trajs_3d`` [n, modes, T, 2], which are positions, and ``trajs_score`` [n, modes].
        pred_map: ``vectors`` (m lines [points, 2]), ``scores`` and ``labels`` [m].
        pred_plan: ``final_planning`` [T, 2], which are positions, and ``planning`` and ``planning_score`` of all modes.
    """

    def set_predictions(self, results: dict[str, Any]) -> None:
        """Fill in ``pred_instances_3d``, ``pred_map`` and ``pred_plan`` from one dict with the results of all heads.

        Tensors of the map become arrays, and its lines a list.
        """
        parts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for name, value in results.items():
            part = _PART_OF.get(name, "pred_instances_3d")
            if part == "pred_map" and isinstance(value, Tensor):
                value = value.numpy()
            parts[part][name] = list(value) if name == "vectors" else value
        for name, found in parts.items():
            kind = BaseDataElement if name == "pred_plan" else InstanceData
            self.set_field(kind(**found), name, dtype=kind)

    def to(self, *args: Any, **kwargs: Any) -> "DrivingDataSample":
        """Return a copy whose tensors, ``gt_depth`` included, are converted by ``Tensor.to``."""
        return self._with_depth(super().to(*args, **kwargs), lambda level: level.to(*args, **kwargs))

    def with_inputs_on(self, device: torch.device, non_blocking: bool = False) -> "DrivingDataSample":
        """Return a copy whose tensors are on ``device``, except those whose length depends on the scene."""
        rest = self.new()
        lists = {name: rest.pop(name) for name in self.keys() if name.startswith(_OF_TRUE_INSTANCES)}
        moved = rest.to(device, non_blocking=non_blocking)
        moved.set_data(lists)
        return moved

    def pin_memory(self) -> "DrivingDataSample":
        """Move the tensors to pinned memory. Data loaders call this."""
        for name, value in self.items():
            if isinstance(value, Tensor):
                self.set_field(value.pin_memory(), name)
        return self._with_depth(self, Tensor.pin_memory)

    def _with_depth(
        self, copied: "DrivingDataSample", change: Callable[[Tensor], Tensor]
    ) -> "DrivingDataSample":
        if "gt_depth" in self:
            copied.set_field([change(level) for level in self.gt_depth], "gt_depth")
        return copied


def predictions_of(sample: DrivingDataSample | dict[str, Any]) -> dict[str, Any]:
    """Return all predictions for a frame in one dict, given its sample or the result of its ``to_dict``."""
    parts = (sample.get(name, {}) for name in ("pred_instances_3d", "pred_map", "pred_plan"))
    return {name: value for part in parts for name, value in part.items()}
