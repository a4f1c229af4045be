"""SparseDrive's head: boxes, map, and on top of them motion and planning."""

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.model import BaseModule
from torch import Tensor

from visdet.errors import InvalidInputError
from visdet.registry import MODELS

__all__ = ["SparseDriveHead"]


@MODELS.register_module()
class SparseDriveHead(BaseModule):
    """The tasks of SparseDrive on one feature pyramid.

    Args:
        task_config: ``with_det``, ``with_map``, ``with_motion_plan``; the last needs the other two.
        det_head, map_head, motion_plan_head: configs of the tasks' heads; those of absent tasks are not built.
        freeze_perception: detection and map stay as they are; needs motion and planning, which alone learn.

    The temporal state of all tasks is ``state``, one value. The motion head takes part through a ``state`` of its own
    or of its ``instance_queue``.

    Source: arXiv 2405.19620; names are SparseDrive's. Different: each sample has results of its own.
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
            decoder = self.motion_plan_head.motion_decoder
            if decoder.num_output is None:  # a trajectory for each box of the results
                decoder.num_output = self.det_head.decoder.num_output

    @property
    def with_det(self) -> bool:
        return self.task_config["with_det"]

    @property
    def with_map(self) -> bool:
        return self.task_config["with_map"]

    @property
    def with_motion_plan(self) -> bool:
        return self.task_config["with_motion_plan"]

    def _stateful(self) -> dict[str, Any]:
        """Return the parts that remember, by the names of their tasks."""
        parts = {}
        if self.with_det:
            parts["det"] = self.det_head
        if self.with_map:
            parts["map"] = self.map_head
        if self.with_motion_plan:
            motion = self.motion_plan_head
            parts["motion_plan"] = motion if hasattr(motion, "state") else motion.instance_queue
        return parts

    @property
    def state(self) -> dict[str, Any]:
        """What the next frame starts from: a value of each task that remembers."""
        return {name: part.state for name, part in self._stateful().items()}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        for name, part in self._stateful().items():
            part.state = state[name]

    def forward(
        self, feature_maps: Tensor | Sequence[Any], metas: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, ...]:
        """Return the raw outputs of detection, map, motion and planning, None for an absent task.

        Args:
            feature_maps: what ``feature_maps_format`` returns, or [B, V, C, H, W] of each level.
            metas: ``projection_mat``, ``image_wh``, ``timestamp``, ``img_metas``; in training the ground truth too.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_perception):
            det_output = self.det_head(feature_maps, metas) if self.with_det else None
            map_output = self.map_head(feature_maps, metas) if self.with_map else None
        motion_output = planning_output = None
        if self.with_motion_plan:
            bank = self.det_head.instance_bank
            motion_output, planning_output = self.motion_plan_head(
                det_output,
                map_output,
                feature_maps,
                metas,
                self.det_head.anchor_encoder,
                bank.mask,
                bank.anchor_handler,
            )
        return det_output, map_output, motion_output, planning_output

    def loss(self, model_outs: tuple[dict[str, Any] | None, ...], data: dict[str, Any]) -> dict[str, Tensor]:
        """Return the losses of all tasks by name.

        Args:
            model_outs: what ``forward`` returned. data: the ground truth of all tasks.
        """
        det_output, map_output, motion_output, planning_output = model_outs
        losses: dict[str, Tensor] = {}
        if self.freeze_perception:
            self.det_head.match(det_output, data)  # motion learns from the boxes of the matched instances
        else:
            if self.with_det:
                losses.update(self.det_head.loss(det_output, data))
            if self.with_map:
                losses.update(self.map_head.loss(map_output, data))
        if self.with_motion_plan:
            matches = {"indices": self.det_head.sampler.indices}  # of the last decoder layer
            losses.update(self.motion_plan_head.loss(motion_output, planning_output, data, matches))
        return losses

    def post_process(
        self, model_outs: tuple[dict[str, Any] | None, ...], data: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the results of each sample, those of all tasks in one dict."""
        det_output, map_output, motion_output, planning_output = model_outs
        of_tasks = []
        if self.with_det:
            of_tasks.append(self.det_head.post_process(det_output))
        if self.with_map:
            of_tasks.append(self.map_head.post_process(map_output))
        if self.with_motion_plan:
            of_tasks.extend(
                self.motion_plan_head.post_process(det_output, motion_output, planning_output, data)
            )
        return [
            {name: value for result in results for name, value in result.items()}
            for results in zip(*of_tasks, strict=True)
        ]
