"""SparseDrive's head: boxes, map, and on top of them motion and planning."""

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from mmengine.model import BaseModule
from torch import Tensor

from visdet.errors import InvalidInputError
from visdet.execution.capture import in_parallel
from visdet.registry import MODELS

from .base_target import Assignment, PairCosts
from .boxes.denoising import DenoisingQueries
from .padded_instances import padded_rows
from .temporal.frame_clock import FrameStep


@MODELS.register_module()
class SparseDriveHead(BaseModule):
    """Detection, map, motion and planning on one feature pyramid.

    Args:
        task_config: the bools ``with_det``, ``with_map`` and ``with_motion_plan``. The last one needs the other two.
        det_head, map_head, motion_plan_head: configs of the heads of the tasks. Heads of absent tasks are not built.
        freeze_perception: whether detection and map stay as they are, and only motion and planning learn.

    The temporal state, an argument and a result of ``forward``, is a dict with the state of each task by its name.

    Source: arXiv 2405.19620; names are SparseDrive's. Difference: each sample has results of its own.
    """

    def __init__(
        self,
        task_config: dict[str, bool],
        det_head: dict[str, Any] | None = None,
        map_head: dict[str, Any] | None = None,
        motion_plan_head: dict[str, Any] | None = None,
        freeze_perception: bool = False,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.freeze_perception = freeze_perception
        self.task_config = {
            name: bool(task_config.get(name, False)) for name in ("with_det", "with_map", "with_motion_plan")
        }
        if self.with_motion_plan and not (self.with_det and self.with_map):
            raise InvalidInputError(
                f"SparseDriveHead: with_motion_plan needs with_det and with_map, got {dict(task_config)}"
            )
        if not (self.with_det or self.with_map):
            raise InvalidInputError(f"SparseDriveHead: task_config must have a task, got {dict(task_config)}")
        if freeze_perception and not self.with_motion_plan:
            raise InvalidInputError(
                f"SparseDriveHead: freeze_perception needs with_motion_plan, got {dict(task_config)}"
            )
        if self.with_det:
            self.det_head = MODELS.build(det_head)
        if self.with_map:
            self.map_head = MODELS.build(map_head)
        if self.with_motion_plan:
            self.motion_plan_head = MODELS.build(motion_plan_head)
            # Each box of the results gets its trajectories.
            decoder, boxes = self.motion_plan_head.motion_decoder, self.det_head.decoder
            if decoder.num_output is None:
                decoder.num_output = boxes.num_output
            if decoder.score_threshold is None:
                decoder.score_threshold = boxes.score_threshold
            if decoder.min_distance is None:
                decoder.min_distance = boxes.min_distance
            self._check_motion_anchor()

    def _check_motion_anchor(self) -> None:
        """Raise InvalidInputError if a class of boxes has no trajectories that motion starts from."""
        numbers = {
            layer.num_cls for layer in self.det_head.layers if getattr(layer, "cls_layers", None) is not None
        }
        anchors = len(self.motion_plan_head.motion_anchor)
        if numbers and max(numbers) > anchors:
            raise InvalidInputError(
                f"SparseDriveHead: motion_anchor of motion_plan_head must have the {max(numbers)} classes of "
                f"det_head, got {anchors}"
            )

    @property
    def with_det(self) -> bool:
        return self.task_config["with_det"]

    @property
    def with_map(self) -> bool:
        return self.task_config["with_map"]

    @property
    def with_motion_plan(self) -> bool:
        return self.task_config["with_motion_plan"]

    @property
    def is_temporal(self) -> bool:
        """Whether something is kept from frame to frame, for which the times and poses of frames are needed."""
        return self.with_motion_plan or any(head.is_temporal for head in self._tasks().values())

    def _tasks(self) -> dict[str, Any]:
        """Return the heads by the names of their tasks."""
        names = {"det": "det_head", "map": "map_head", "motion_plan": "motion_plan_head"}
        return {name: getattr(self, head) for name, head in names.items() if self.task_config[f"with_{name}"]}

    def enter(self, state: dict[str, Any] | None, batch_size: int, step: FrameStep | None) -> dict[str, Any]:
        """Return the state with which a frame starts. This is all work on the host that ``forward`` needs.

        Args:
            state: what the frame before left, or None in a first frame. batch_size: B.
            step: what lies between the two frames, or None if the frame has no predecessor.
        """
        return {
            name: head.enter(None if state is None else state[name], batch_size, step)
            for name, head in self._tasks().items()
        }

    def denoising_queries(self, metas: dict[str, Any]) -> DenoisingQueries | None:
        """Return noisy copies of the boxes in ``metas``, from which detection learns, or None if there are none."""
        return self.det_head.denoising_queries(metas) if self.with_det else None

    def forward(
        self,
        feature_maps: Tensor | Sequence[Any],
        metas: dict[str, Any],
        state: dict[str, Any] | None = None,
        denoising: DenoisingQueries | None = None,
    ) -> tuple[tuple[dict[str, Any] | None, ...], dict[str, Any]]:
        """Return the raw outputs of detection, map, motion and planning, and the state for the next frame.

        The outputs of an absent task are None.

        Args:
            feature_maps: the result of ``feature_maps_format``, or [B, V, C, H, W] of each level.
            metas: ``projection_mat`` and ``image_wh``.
            state: the result of ``enter``. With None, the frame is a first one.
            denoising: the result of ``denoising_queries``.
        """
        state = self.enter(None, len(feature_maps[0]), None) if state is None else state
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_perception):
            outputs = _of_tasks(
                [name for name in ("det", "map") if self.task_config[f"with_{name}"]],
                det=lambda: self.det_head(feature_maps, metas, state["det"], denoising),
                map=lambda: self.map_head(feature_maps, metas, state["map"]),
                reads=feature_maps,
            )
        after = {name: kept for name, (_, kept) in outputs.items()}
        det_output, map_output = (outputs[name][0] if name in outputs else None for name in ("det", "map"))
        motion_output = planning_output = None
        if self.with_motion_plan:
            motion_output, planning_output, after["motion_plan"] = self.motion_plan_head(
                det_output,
                map_output,
                feature_maps,
                state["motion_plan"],
                self.det_head.anchor_encoder,
                after["det"].bank.mask,
                self.det_head.instance_bank.anchor_handler,
            )
        return (det_output, map_output, motion_output, planning_output), after

    def ground_truth(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the instances of the batch by task, padded and on the device.

        Args:
            data: the ground truth of all tasks, lists of one tensor per sample.

        Returns:
            ``PaddedInstances`` for ``det`` and ``map``, and for ``motion`` the future steps [B, N, T, 2] and masks
            [B, N, T] of the boxes.
        """
        device = next(self.parameters()).device
        truth: dict[str, Any] = {}
        if self.with_det:
            truth["det"] = self.det_head.ground_truth(data, device)
        if self.with_map and not self.freeze_perception:
            truth["map"] = self.map_head.ground_truth(data, device)
        if self.with_motion_plan:
            futures = (data["gt_agent_fut_trajs"], data["gt_agent_fut_masks"])
            truth["motion"] = tuple(
                padded_rows([row.cpu().float() for row in rows], device) for rows in futures
            )
        return truth

    def pair_costs(
        self, model_outs: tuple[dict[str, Any] | None, ...], truth: dict[str, Any]
    ) -> dict[str, PairCosts]:
        """Return what it costs to assign instances to predictions, by task. All work runs on the device.

        Args:
            model_outs: the result of ``forward``. truth: the result of ``ground_truth``.
        """
        det_output, map_output, *_ = model_outs
        return _of_tasks(
            truth,
            det=lambda: self.det_head.pair_costs(det_output, truth["det"], only_last=self.freeze_perception),
            map=lambda: self.map_head.pair_costs(map_output, truth["map"]),
        )

    def losses(
        self,
        model_outs: tuple[dict[str, Any] | None, ...],
        data: dict[str, Any],
        truth: dict[str, Any],
        costs: dict[str, PairCosts],
        assigned: dict[str, Assignment],
    ) -> dict[str, Tensor]:
        """Return the losses of all tasks by name. All work runs on the device.

        Args:
            model_outs: the result of ``forward``. data: the ground truth of the ego vehicle.
            truth: the result of ``ground_truth``. costs: the result of ``pair_costs``.
            assigned: the result of ``assigned_instances``.
        """
        det_output, map_output, motion_output, planning_output = model_outs
        of_tasks = _of_tasks(
            () if self.freeze_perception else truth,
            det=lambda: self.det_head.losses(det_output, truth["det"], costs["det"], assigned["det"]),
            map=lambda: self.map_head.losses(map_output, truth["map"], costs["map"], assigned["map"]),
        )
        losses = {name: value for of_task in of_tasks.values() for name, value in of_task.items()}
        if self.with_motion_plan:
            # It learns from the boxes that the last layer of detection has matched.
            futures = self.motion_plan_head.motion_sampler.futures(
                *truth["motion"], assigned["det"].index[-1]
            )
            num_matched = assigned["det"].num_positive[len(assigned["det"].index) - 1]
            losses |= self.motion_plan_head.loss(motion_output, planning_output, data, futures, num_matched)
        return losses

    def select(
        self, model_outs: tuple[dict[str, Any] | None, ...], data: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return the results of the batch by task, on its device. All work runs on the device."""
        det_output, map_output, motion_output, planning_output = model_outs
        selected = {}
        if self.with_det:
            selected["det"] = self.det_head.select(det_output)
        if self.with_map:
            selected["map"] = self.map_head.select(map_output)
        if self.with_motion_plan:
            selected["motion_plan"] = self.motion_plan_head.select(
                det_output, motion_output, planning_output, data
            )
        return selected


def _of_tasks(
    tasks: Container[str], det: Callable[[], Any], map: Callable[[], Any], reads: Any = ()
) -> dict[str, Any]:
    """Return the results of the functions of detection and map, of those that are in ``tasks``, by task.

    Args:
        reads: the tensors that both read and that were made for this call.
    """
    if "det" in tasks and "map" in tasks:
        of_det, of_map = in_parallel(det, map, reads)
        return {"det": of_det, "map": of_map}
    return {name: function() for name, function in (("det", det), ("map", map)) if name in tasks}
