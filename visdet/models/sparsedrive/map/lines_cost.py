"""The costs of matching polylines."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.errors import InvalidInputError
from visdet.registry import TASK_UTILS, built

from ...matching.match_costs import FocalLossCost


@TASK_UTILS.register_module()
class LinesL1Cost:
    """The L1 or smooth L1 distance of two polylines, averaged over their points.

    If a line has several equivalent orderings of its points, the cost is that of the best one.

    Args:
        weight: factor on the cost.
        beta: the distance below which smooth L1 is quadratic. With 0 it is plain L1.
        permute: whether each annotated line comes in several orderings.

    Source: StreamMapNet; names and defaults are SparseDrive's.
    """

    def __init__(self, weight: float = 1.0, beta: float = 0.0, permute: bool = False) -> None:
        self.weight = weight
        self.beta = beta
        self.permute = permute

    def __call__(self, lines_pred: Tensor, gt_lines: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the cost [..., Q, N] and, with ``permute``, the index of the best ordering [..., Q, N] int64.

        Args:
            lines_pred: [Q, D], where D = 2 · points, or [..., B, Q, D] for a batch.
            gt_lines: [N, D], or [N, orderings, D] with ``permute``. For a batch there is another first axis B.

        Raises:
            ValueError: ``gt_lines`` has another number of axes.
        """
        permute = self.permute
        expected = 3 if permute else 2
        axes = gt_lines.dim()
        if axes != expected + (lines_pred.dim() > 2):
            raise InvalidInputError(
                f"LinesL1Cost: gt_lines must have {expected} axes with permute={permute}, got {axes}; "
                "for predictions with leading axes it must have one more"
            )
        flat = gt_lines.flatten(-3, -2) if permute else gt_lines
        beta = self.beta
        if beta == 0:
            distance = torch.cdist(lines_pred, flat, p=1)
        else:
            predicted, true = torch.broadcast_tensors(lines_pred.unsqueeze(-2), flat.unsqueeze(-3))
            distance = F.smooth_l1_loss(predicted, true, reduction="none", beta=beta).sum(-1)
        distance = distance / (lines_pred.shape[-1] // 2) * self.weight
        if not permute:
            return distance, None
        best = distance.unflatten(-1, gt_lines.shape[-3:-1]).min(-1)
        return best.values, best.indices


@TASK_UTILS.register_module()
class MapQueriesCost:
    """The sum of a class cost and a line cost.

    Args:
        cls_cost: ``FocalLossCost`` or its config. reg_cost: ``LinesL1Cost`` or its config.

    Source: StreamMapNet; names are SparseDrive's.
    """

    def __init__(
        self, cls_cost: dict[str, Any] | FocalLossCost, reg_cost: dict[str, Any] | LinesL1Cost
    ) -> None:
        self.cls_cost = built(cls_cost, TASK_UTILS)
        self.reg_cost = built(reg_cost, TASK_UTILS)

    def __call__(self, preds: dict[str, Tensor], gts: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the cost [..., Q, N] and, if lines are permuted, also the best orderings; see ``LinesL1Cost``.

        Args:
            preds: ``lines`` [..., Q, D] and ``scores`` [..., Q, C], which are logits.
            gts: ``lines`` as in ``LinesL1Cost`` and ``labels`` [..., N].
        """
        cost, ordering = self.reg_cost(preds["lines"], gts["lines"])
        return self.cls_cost.of_labels(preds["scores"], gts["labels"]) + cost, ordering


@TASK_UTILS.register_module()
class HungarianLinesAssigner:
    """The cost by which polylines are matched one to one. The class is named as in the configs of SparseDrive.

    Args:
        cost: ``MapQueriesCost`` or its config.

    Source: names are SparseDrive's.
    """

    def __init__(self, cost: dict[str, Any] | MapQueriesCost) -> None:
        self.cost = built(cost, TASK_UTILS)
