"""One-to-one assignment of predictions to ground truth with the least total cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.structures import InstanceData
from torch import Tensor

from visdet.errors import InvalidTypeError
from visdet.registry import TASK_UTILS

from .assignment import solve_assignment
from .match_costs import MatchCost, single_image_targets
from .padded_targets import PaddedTargets


@dataclass(frozen=True)
class AssignResult:
    """The assignment of one image in mmdet's form.

    Attributes:
        num_gts: number of ground-truth boxes.
        gt_inds: [Q] int64, 0 for background, otherwise 1 + index of the assigned ground truth.
        labels: [Q] int64, -1 for background, otherwise the assigned class.
        max_overlaps: always None, because this assigner computes no overlaps.
    """

    num_gts: int
    gt_inds: Tensor
    labels: Tensor
    max_overlaps: Tensor | None = None


@TASK_UTILS.register_module()
class HungarianAssigner:
    """Matches ground-truth boxes one-to-one with predictions so that the total cost is least.

    If there are fewer predictions than boxes, some boxes stay without a prediction. A NaN or infinite cost counts as
    1e8, so that a diverging model is noticed by its loss and does not stop the solver.

    Args:
        match_costs: a cost, its config, or a list of either. The costs are added.

    Raises:
        TypeError: there are no costs, or one of them is not a ``MatchCost``.

    Source: Carion et al., DETR, ECCV 2020.
    """

    def __init__(
        self, match_costs: Sequence[dict[str, Any] | MatchCost] | dict[str, Any] | MatchCost
    ) -> None:
        if isinstance(match_costs, (dict, MatchCost)):
            match_costs = [match_costs]
        self.match_costs = [
            TASK_UTILS.build(cost) if isinstance(cost, dict) else cost for cost in match_costs
        ]
        if not self.match_costs or not all(isinstance(cost, MatchCost) for cost in self.match_costs):
            raise InvalidTypeError(
                f"HungarianAssigner: match_costs must be MatchCosts or their configs, got {match_costs!r}"
            )

    def cost(self, logits: Tensor, boxes_xyxy: Tensor, targets: PaddedTargets) -> Tensor:
        """Return the total cost [..., Q, N] of logits [..., Q, C] and boxes [..., Q, 4] in pixels."""
        costs = [cost.pairwise(logits, boxes_xyxy, targets) for cost in self.match_costs]
        return sum(costs[1:], start=costs[0])

    @torch.no_grad()
    def assign(
        self, pred_instances: InstanceData, gt_instances: InstanceData, img_meta: dict[str, Any] | None = None
    ) -> AssignResult:
        """Return the assignment of one image. The interface is mmdet's.

        Args:
            pred_instances: ``scores`` [Q, C], which are logits, and ``bboxes`` [Q, 4] (x1, y1, x2, y2) in pixels.
            gt_instances: ``bboxes`` [N, 4] (x1, y1, x2, y2) in pixels, and ``labels`` [N].
            img_meta: ``img_shape`` (height, width). Without it, the costs do not divide boxes by the image's size.
        """
        targets = single_image_targets(gt_instances, img_meta)
        cost = self.cost(pred_instances.get("scores"), pred_instances.bboxes, targets)
        rows, columns = (torch.from_numpy(index) for index in solve_assignment(cost))
        gt_inds = targets.labels.new_zeros(len(pred_instances))
        labels = torch.full_like(gt_inds, -1)
        rows, columns = rows.to(gt_inds.device), columns.to(gt_inds.device)
        gt_inds[rows] = columns + 1
        labels[rows] = targets.labels[columns]
        return AssignResult(num_gts=len(gt_instances), gt_inds=gt_inds, labels=labels)
