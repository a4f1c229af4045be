"""Assignment of predicted polylines to annotated ones."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.errors import InvalidInputError, InvalidTypeError
from visdet.ops.tracing import is_traced
from visdet.registry import TASK_UTILS

from ...matching.match_costs import FocalLossCost


def _may_be_read(tensor: Tensor) -> bool:
    """Return whether the host may read the numbers of a tensor without waiting. Those of a subclass may not exist."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not is_traced()


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

    def __call__(self, lines_pred: Tensor, gt_lines: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the cost [..., Q, N] and, with ``permute``, the index of the best ordering [..., Q, N] int64.

        Args:
            lines_pred: [Q, D], where D = 2 · points, or [..., B, Q, D] for a batch.
            gt_lines: [N, D], or [N, orderings, D] with ``permute``. For a batch there is another first axis B.

        Raises:
            ValueError: ``gt_lines`` has another number of axes.
        """
        expected = 3 if self.permute else 2
        if gt_lines.dim() != expected + int(lines_pred.dim() > 2):
            raise InvalidInputError(
                f"LinesL1Cost: gt_lines must have {expected} axes with permute={self.permute}, got {gt_lines.dim()}; "
                "for predictions with leading axes it must have one more"
            )
        flat = gt_lines.flatten(-3, -2) if self.permute else gt_lines
        if self.beta == 0:
            distance = torch.cdist(lines_pred, flat, p=1)
        elif self.permute and _may_be_read(lines_pred) and _may_be_read(flat):
            distance = self._distance_without_far_orderings(lines_pred, gt_lines)
        else:
            distance = self._smooth_distance(lines_pred, flat)
        distance = distance / (lines_pred.shape[-1] // 2) * self.weight
        if not self.permute:
            return distance
        best = distance.unflatten(-1, gt_lines.shape[-3:-1]).min(-1)
        return best.values, best.indices

    def _smooth_distance(self, lines_pred: Tensor, flat: Tensor) -> Tensor:
        """Return the sums of smooth L1 [..., Q, M] between lines [..., Q, D] and [..., M, D]."""
        predicted, true = torch.broadcast_tensors(lines_pred.unsqueeze(-2), flat.unsqueeze(-3))
        return F.smooth_l1_loss(predicted, true, reduction="none", beta=self.beta).sum(-1)

    def _distance_without_far_orderings(self, lines_pred: Tensor, gt_lines: Tensor) -> Tensor:
        """Return the sums [..., Q, N · orderings]. Those of orderings that no prediction can be nearest to are inf.

        An open line has two orderings, and the others, most of all, are there to fill up the tensor.
        """
        predicted = lines_pred if lines_pred.dim() > 2 else lines_pred.unsqueeze(0)  # [..., B, Q, D]
        lines = gt_lines if gt_lines.dim() > 3 else gt_lines.unsqueeze(0)  # [B, N, orderings, D]
        distance = predicted.new_full((*predicted.shape[:-1], lines.shape[1] * lines.shape[2]), torch.inf)
        for sample, may_be_nearest in enumerate(self._may_be_nearest(predicted, lines)):
            rows = may_be_nearest.flatten().nonzero().squeeze(-1)
            of_rows = lines[sample].flatten(0, 1)[rows]
            of_sample = self._smooth_distance(predicted[..., sample, :, :], of_rows)
            distance[..., sample, :, :].index_copy_(-1, rows, of_sample)
        return distance.reshape(*lines_pred.shape[:-1], -1)

    def _may_be_nearest(self, predicted: Tensor, lines: Tensor) -> Tensor:
        """Return whether an ordering may be the nearest one of its line to a prediction, bool [B, N, orderings].

        Smooth L1 is at most L1 and at least L1 - beta / 2. The bounds of L1 follow from the box around all predictions.
        If a prediction is not finite, nothing is known of it, and the result is True.
        """
        if predicted.numel() == 0:
            return torch.ones_like(lines[..., 0], dtype=torch.bool)
        low, high = torch.aminmax(predicted.flatten(0, -2), dim=0)
        at_most = torch.maximum(lines - low, high - lines).sum(-1)
        at_least = torch.maximum(lines - high, low - lines).clamp(min=0).sum(-1)
        at_least = at_least - self.beta / 2 * lines.shape[-1]
        return ~(at_least > at_most.amin(-1, keepdim=True))


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
        self.cls_cost = TASK_UTILS.build(cls_cost) if isinstance(cls_cost, dict) else cls_cost
        self.reg_cost = TASK_UTILS.build(reg_cost) if isinstance(reg_cost, dict) else reg_cost
        if not isinstance(self.cls_cost, FocalLossCost) or not isinstance(self.reg_cost, LinesL1Cost):
            raise InvalidTypeError(
                "MapQueriesCost: cls_cost must be a FocalLossCost and reg_cost a LinesL1Cost, "
                f"got {type(self.cls_cost).__name__} and {type(self.reg_cost).__name__}"
            )

    def __call__(self, preds: dict[str, Tensor], gts: dict[str, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """Return the cost [..., Q, N] and, if lines are permuted, also the best orderings; see ``LinesL1Cost``.

        Args:
            preds: ``lines`` [..., Q, D] and ``scores`` [..., Q, C], which are logits.
            gts: ``lines`` as in ``LinesL1Cost`` and ``labels`` [..., N].
        """
        lines_cost = self.reg_cost(preds["lines"], gts["lines"])
        cost, *orderings = lines_cost if isinstance(lines_cost, tuple) else (lines_cost,)
        cost = self.cls_cost.of_labels(preds["scores"], gts["labels"]) + cost
        return (cost, *orderings) if orderings else cost


@TASK_UTILS.register_module()
class HungarianLinesAssigner:
    """The cost by which polylines are matched one to one. The class is named as in the configs of SparseDrive.

    Args:
        cost: ``MapQueriesCost`` or its config.

    Source: names are SparseDrive's.
    """

    def __init__(self, cost: dict[str, Any] | MapQueriesCost) -> None:
        self.cost = TASK_UTILS.build(cost) if isinstance(cost, dict) else cost

    def pairwise(self, preds: dict[str, Tensor], gts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the cost [..., Q, N] and the best ordering [..., Q, N], which is 0 if lines have only one."""
        cost = self.cost(preds, gts)
        return cost if isinstance(cost, tuple) else (cost, torch.zeros_like(cost, dtype=torch.int64))
