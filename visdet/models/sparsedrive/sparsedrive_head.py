"""SparseDrive's head: boxes, map, and on top of them motion and planning."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visdet.errors import InvalidInputError
from visdet.registry import MODELS

from ..transfer import device_of
from .base_target import Assignment, PairCosts
from .boxes.box3d_target import DenoisingQueries
from .heads_of_tasks import HeadOfTasks, side_by_side
from .sparse4d_loss import Sparse4DLoss
from .temporal.frame_clock import FrameStep


@MODELS.register_module()
class SparseDriveHead(HeadOfTasks):
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
        with_det, with_map, with_motion_plan = (
            bool(task_config.get(name, False)) for name in ("with_det", "with_map", "with_motion_plan")
        )
        self.with_det = with_det
        self.with_map = with_map
        self.with_motion_plan = with_motion_plan
        has_both = with_det and with_map
        learns = not freeze_perception
        for is_met, condition in (
            (has_both or not with_motion_plan, "with_motion_plan needs with_det and with_map"),
            (with_det or with_map, "task_config must have a task"),
            (with_motion_plan or learns, "freeze_perception needs with_motion_plan"),
        ):
            if not is_met:
                raise InvalidInputError(f"SparseDriveHead: {condition}, got {dict(task_config)}")
        model_of = MODELS.build
        if with_det:
            self.det_head = model_of(det_head)
        if with_map:
            self.map_head = model_of(map_head)
        if has_both:
            prefix = self.map_head.task_prefix
            if self.det_head.task_prefix == prefix:
                raise InvalidInputError(
                    f"SparseDriveHead: task_prefix of det_head and map_head must differ, got {prefix!r}"
                )
        if with_motion_plan:
            detection = self.det_head
            criterion = detection.criterion
            criterion.learns = learns
            motion = model_of(motion_plan_head)
            self.motion_plan_head = motion
            # Each box of the results gets its trajectories.
            decoder = motion.motion_decoder
            boxes = detection.decoder
            for option in ("num_output", "score_threshold", "min_distance"):
                if getattr(decoder, option) is None:
                    setattr(decoder, option, getattr(boxes, option))
            classes = criterion.num_classes or 0
            given = len(motion.motion_anchor)
            if classes > given:  # A class of boxes would have no trajectories that motion starts from.
                raise InvalidInputError(
                    f"SparseDriveHead: motion_anchor of motion_plan_head must have the {classes} classes of det_head, "
                    f"got {given}"
                )

    @property
    def is_temporal(self) -> bool:
        """Whether something is kept from frame to frame, for which the times and poses of frames are needed."""
        return self.with_motion_plan or any(head.is_temporal for head in self._perception().values())

    def _perception(self) -> dict[str, Any]:
        """Return the heads of detection and map by the names of their tasks."""
        return {
            name: getattr(self, f"{name}_head") for name in ("det", "map") if getattr(self, f"with_{name}")
        }

    def criteria(self) -> dict[str, Sparse4DLoss]:
        """Return the criterion of detection and of map. If both stay as they are, only boxes are matched."""
        heads = [self.det_head] if self.freeze_perception else self._perception().values()
        return {head.task_prefix: head.criterion for head in heads}

    def outputs_by_task(self, model_outs: tuple[dict[str, Any] | None, ...]) -> dict[str, Any]:
        """Return the outputs of detection and map."""
        outs = dict(zip(("det", "map"), model_outs, strict=False))
        by_task: dict[str, Any] = {}
        for name, head in self._perception().items():
            by_task |= head.outputs_by_task(outs[name])
        return by_task

    def enter(self, state: dict[str, Any] | None, batch_size: int, step: FrameStep | None) -> dict[str, Any]:
        """Return the state with which a frame starts. This is all work on the host that ``forward`` needs.

        Args:
            state: what the frame before left, or None in a first frame. batch_size: B.
            step: what lies between the two frames, or None if the frame has no predecessor.
        """
        entered: dict[str, Any] = {
            name: head.enter(state and state[name], batch_size, step)
            for name, head in self._perception().items()
        }
        # Motion and planning remember instances of detection, and nothing if that starts anew.
        if self.with_motion_plan:
            detection_continues = entered["det"].bank.step is not None
            entered["motion_plan"] = state["motion_plan"] if state and detection_continues else None
        return entered

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
        state = state or self.enter(None, len(feature_maps[0]), None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_perception):
            heads = self._perception()
            maps_and_metas = (dict.fromkeys(heads, shared) for shared in (feature_maps, metas))
            outputs = side_by_side(heads, *maps_and_metas, state, {"det": denoising, "map": None})
        found: dict[str, Any] = {}
        after: dict[str, Any] = {}
        for name, (output, left) in outputs.items():
            found[name] = output
            after[name] = left
        det_output = found.get("det")
        map_output = found.get("map")
        motion_output = planning_output = None
        if self.with_motion_plan:
            detection = self.det_head
            motion_output, planning_output, after["motion_plan"] = self.motion_plan_head(
                det_output,
                map_output,
                feature_maps,
                state["motion_plan"],
                detection.anchor_encoder,
                state["det"].bank.step,
                detection.instance_bank.anchor_handler,
            )
        return (det_output, map_output, motion_output, planning_output), after

    def ground_truth(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the instances of each task, and for ``motion`` the future steps [B, N, T, 2] and their masks."""
        truth = super().ground_truth(data)
        if self.with_motion_plan:
            device = device_of(self)
            truth["motion"] = self.motion_plan_head.criterion.ground_truth(data, device)
        return truth

    def losses(
        self,
        model_outs: tuple[dict[str, Any] | None, ...],
        data: dict[str, Any],
        truth: Mapping[str, Any],
        costs: Mapping[str, PairCosts],
        assigned: Mapping[str, Assignment],
    ) -> dict[str, Tensor]:
        """Return the losses of all tasks by name; see the base class. Motion learns from the boxes that are matched."""
        losses = super().losses(model_outs, data, truth, costs, assigned)
        if self.with_motion_plan:
            matched = assigned[self.det_head.task_prefix]
            criterion = self.motion_plan_head.criterion
            losses |= criterion.losses(*model_outs[2:], data, truth["motion"], matched)
        return losses

    def select(
        self, model_outs: tuple[dict[str, Any] | None, ...], data: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return the results of the batch by task, on its device. All work runs on the device."""
        det_output, map_output, motion_output, planning_output = model_outs
        outs = {"det": det_output, "map": map_output}
        selected = {task: head.select(outs[task], data) for task, head in self._perception().items()}
        if self.with_motion_plan:
            selected["motion_plan"] = self.motion_plan_head.select(
                det_output, motion_output, planning_output, data
            )
        return selected
