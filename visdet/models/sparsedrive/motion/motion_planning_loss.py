"""The losses of motion and of planning."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visdet.registry import MODELS, TASK_UTILS

from ...layers.precision import without_autocast
from ..base_target import Assignment, padded_rows
from ..sample_batch import field_of
from .motion_target import best_modes


class MotionPlanningLoss:
    """The criterion of a ``MotionPlanningHead``: its ground truth, and the losses. Nothing of it is matched.

    Motion learns from the boxes that detection has matched, and planning from the way of the ego vehicle.

    Args:
        motion: configs of the targets, and of the losses of classes and of steps.
        planning: the same, followed by the config of the loss of the status.
    """

    def __init__(self, motion: Sequence[Any], planning: Sequence[Any]) -> None:
        motion_sampler, *motion_losses = motion
        planning_sampler, *plan_losses = planning
        self.motion_sampler = TASK_UTILS.build(motion_sampler)
        self.motion_loss_cls, self.motion_loss_reg = map(MODELS.build, motion_losses)
        self.planning_sampler = TASK_UTILS.build(planning_sampler)
        self.plan_loss_cls, self.plan_loss_reg, self.plan_loss_status = map(MODELS.build, plan_losses)

    def ground_truth(self, data: dict[str, Any], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the future steps [B, N, T, 2] of the boxes of a batch and their masks [B, N, T] on the device."""
        futures = (field_of(data, "gt_agent_fut_trajs"), data["gt_agent_fut_masks"])
        steps, masks = (padded_rows([row.cpu().float() for row in rows], device) for rows in futures)
        return steps, masks

    def losses(
        self,
        motion: dict[str, Any],
        planning: dict[str, Any],
        data: dict[str, Any],
        truth: tuple[Tensor, Tensor],
        matched: Assignment,
    ) -> dict[str, Tensor]:
        """Return ``motion_loss_{cls,reg}_i`` and ``planning_loss_{cls,reg,status}_i`` of each refinement i.

        All work runs on the device.

        Args:
            motion, planning: the raw outputs of the head.
            data: ``gt_ego_fut_trajs``, ``gt_ego_fut_masks``, ``gt_ego_fut_cmd`` and ``ego_status`` of the batch.
            truth: the result of ``ground_truth``. matched: the boxes that detection has matched in each of its layers.
        """
        with without_autocast(motion["prediction"][0]):
            return self._motion_losses(motion, truth, matched) | self._planning_losses(planning, data)

    def _motion_losses(
        self, motion: dict[str, Any], truth: tuple[Tensor, Tensor], matched: Assignment
    ) -> dict[str, Tensor]:
        index = matched.index
        target, weight = self.motion_sampler.futures(*truth, index[-1])
        # Numbers of denoising queries follow those of the layers. They are averages over all processes.
        num_matched = matched.num_positive[len(index) - 1]
        counts = weight.any(-1).float().flatten()
        steps = target.flatten(0, 1).cumsum(-2)
        weights = weight.flatten(0, 1).unsqueeze(-1)
        losses = {}
        for i, (cls, reg) in enumerate(zip(motion["classification"], motion["prediction"], strict=True)):
            mode, best = best_modes(reg.float(), target, weight)
            losses[f"motion_loss_cls_{i}"] = self.motion_loss_cls(
                cls.float().flatten(0, 1), mode.flatten(), weight=counts, avg_factor=num_matched
            )
            losses[f"motion_loss_reg_{i}"] = self.motion_loss_reg(
                best.flatten(0, 1).cumsum(-2), steps, weight=weights, avg_factor=num_matched
            )
        return losses

    def _planning_losses(self, planning: dict[str, Any], data: dict[str, Any]) -> dict[str, Tensor]:
        future = field_of(data, "gt_ego_fut_trajs")
        known = field_of(data, "gt_ego_fut_masks")
        given = field_of(data, "ego_status")
        losses = {}
        of_layers = zip(planning["classification"], planning["prediction"], planning["status"], strict=True)
        for i, (all_cls, all_steps, status) in enumerate(of_layers):
            cls, mode, counts, best, true, weight = (
                x.flatten(0, 1)
                for x in self.planning_sampler.sample(all_cls.float(), all_steps.float(), future, known, data)
            )
            losses[f"planning_loss_cls_{i}"] = self.plan_loss_cls(cls, mode, weight=counts.float())
            losses[f"planning_loss_reg_{i}"] = self.plan_loss_reg(best, true, weight=weight.unsqueeze(-1))
            losses[f"planning_loss_status_{i}"] = self.plan_loss_status(
                status.float().squeeze(1), given.to(status.device, torch.float32)
            )
        return losses
