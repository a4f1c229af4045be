"""Targets of motion and planning. The mode that is nearest to the true future learns it."""

from typing import Any

import torch
from torch import Tensor

from visdet.registry import TASK_UTILS

from ...rows import rows_or_zeros
from ..sample_batch import index_of_command


def steps_of(mode: Tensor, steps: Tensor) -> Tensor:
    """Return the steps [B, N, T, 2] of one mode [B, N] of each instance, given those of all [B, N, M, T, 2]."""
    index = mode[..., None, None, None].expand(-1, -1, 1, *steps.shape[-2:])
    return steps.gather(2, index).squeeze(2)


def best_modes(reg_pred: Tensor, reg_target: Tensor, reg_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mode nearest to the target, [B, N], and its steps, [B, N, T, 2].

    Distances are those of positions, which are sums of steps. They are averaged over all T.

    Args:
        reg_pred: [B, N, M, T, 2], steps in metres. reg_target: [B, N, T, 2].
        reg_weight: [B, N, T], 0 where a step is unknown.
    """
    distance = torch.linalg.vector_norm(reg_target.cumsum(-2).unsqueeze(2) - reg_pred.cumsum(-2), dim=-1)
    mode = (distance * reg_weight.unsqueeze(2)).mean(-1).argmin(-1)
    return mode, steps_of(mode, reg_pred)


@TASK_UTILS.register_module()
class MotionTarget:
    """Assigns the future of a true box to the instance that detection has matched with it.

    Source: the name and the rule are SparseDrive's.
    """

    @staticmethod
    def futures(targets: Tensor, masks: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return target steps [B, N, T, 2] and their weights [B, N, T]. All work runs on the device.

        Args:
            targets: [B, n, T, 2], steps of the boxes in metres. masks: [B, n, T], 0 where a step is unknown.
            index: [B, N], the box of each instance, or n if it has none.
        """
        steps = rows_or_zeros(targets.flatten(2), index).unflatten(-1, targets.shape[2:])
        return steps, rows_or_zeros(masks, index)


@TASK_UTILS.register_module()
class PlanningTarget:
    """Assigns the future of the ego vehicle to the modes of the command that was given.

    Args:
        ego_fut_ts: number of steps. ego_fut_mode: number of modes of each of the three commands.

    Source: the name and the rule are SparseDrive's.
    """

    def __init__(self, ego_fut_ts: int, ego_fut_mode: int) -> None:
        self.ego_fut_ts = ego_fut_ts
        self.ego_fut_mode = ego_fut_mode

    def sample(
        self,
        cls_pred: Tensor,
        reg_pred: Tensor,
        gt_reg_target: Tensor,
        gt_reg_mask: Tensor,
        data: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the targets of the modes of the command.

        Args:
            cls_pred: [B, 1, 3 * M]. reg_pred: [B, 1, 3 * M, T, 2], steps in metres.
            gt_reg_target: [B, T, 2]. gt_reg_mask: [B, T], 0 where a step is unknown.
            data: ``gt_ego_fut_cmd`` [B, 3], one-hot in the order right, left, straight.

        Returns:
            The logits of the command's modes [B, 1, M], the best mode [B, 1], whether it counts [B, 1], its steps
            [B, 1, T, 2], the target steps [B, 1, T, 2] and their weights [B, 1, T].
        """
        B = len(reg_pred)
        M = self.ego_fut_mode
        dtype = reg_pred.dtype
        target = gt_reg_target.unsqueeze(1).to(dtype)
        mask = gt_reg_mask.unsqueeze(1).to(dtype)
        given = index_of_command(data)
        cls = cls_pred.reshape(B, 3, 1, M)[given]
        reg = reg_pred.reshape(B, 3, 1, M, self.ego_fut_ts, 2)[given]
        mode, best = best_modes(reg, target, mask)
        return cls, mode, mask.any(-1), best, target, mask
