"""Costs of assigning a prediction to a ground-truth box, for all images and decoder layers at once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from visdet.checks.arguments import also_takes, with_other_names
from visdet.registry import MODELS, TASK_UTILS, built

from ..box_coders import RotatedBoxCoder
from ..boxes import elementwise_overlaps, xyxy_to_cxcywh
from ..layers.precision import at_least_float32
from ..losses import RotatedLoss
from .padded_targets import PaddedTargets


class MatchCost(ABC):
    """A weighted cost of every pair of a prediction and a target. A smaller cost is better.

    Args:
        weight: factor on the cost.

    Attributes:
        box_dim: how many numbers its boxes have, or None if it reads no boxes.
    """

    box_dim: ClassVar[int | None] = None

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    @abstractmethod
    def pairwise(self, logits: Tensor, boxes_px: Tensor, targets: PaddedTargets) -> Tensor:
        """Return the cost [..., Q, N] of logits [..., Q, C] and boxes [..., Q, box_dim] in pixels for N targets."""


@TASK_UTILS.register_module()
class FocalLossCost(MatchCost):
    """The focal loss of the target's class as a positive, minus its focal loss as a negative.

    Args:
        alpha, gamma: as in ``FocalLoss``. weight: factor on the cost.
        eps: added to the probabilities inside the logarithms, so that these stay finite.

    Source: Zhu et al., Deformable DETR; names and defaults are mmdet's.
    """

    @also_takes(binary_input=False)
    def __init__(
        self, alpha: float = 0.25, gamma: float = 2.0, eps: float = 1e-12, weight: float = 1.0
    ) -> None:
        super().__init__(weight)
        self.alpha = alpha
        self.gamma = gamma
        self.eps = eps

    def pairwise(self, logits: Tensor, boxes_px: Tensor, targets: PaddedTargets) -> Tensor:
        return self.of_labels(logits, targets.labels)

    def of_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cost [..., Q, N] of logits [..., Q, C] against labels [..., N]."""
        if logits.shape[-1] > labels.shape[-1]:  # There are more classes than targets.
            return self._of_logits(_of_target_class(logits, labels))
        return _of_target_class(self._of_logits(logits), labels)

    def _of_logits(self, logits: Tensor) -> Tensor:
        p = at_least_float32(logits).sigmoid()
        positive = -(p + self.eps).log() * self.alpha * (1 - p).pow(self.gamma)
        negative = -(1 - p + self.eps).log() * (1 - self.alpha) * p.pow(self.gamma)
        return self.weight * (positive - negative)


@TASK_UTILS.register_module()
class ClassificationCost(MatchCost):
    """The negative softmax probability of the target's class.

    Args:
        weight: factor on the cost.

    Source: Carion et al., DETR, ECCV 2020; names and defaults are mmdet's.
    """

    def pairwise(self, logits: Tensor, boxes_px: Tensor, targets: PaddedTargets) -> Tensor:
        return -self.weight * _of_target_class(logits.softmax(dim=-1), targets.labels)


@TASK_UTILS.register_module()
class BBoxL1Cost(MatchCost):
    """The L1 distance of the four coordinates, each of which is divided by the width or height of the image.

    Args:
        box_format: the coordinates to compare, corners ('xyxy') or centre and size ('xywh').
        weight: factor on the cost.

    Source: Carion et al., DETR; names and defaults are mmdet's.
    """

    box_dim = 4

    def __init__(self, box_format: Literal["xyxy", "xywh"] = "xyxy", weight: float = 1.0) -> None:
        super().__init__(weight)
        self.box_format = box_format

    def pairwise(self, logits: Tensor, boxes_px: Tensor, targets: PaddedTargets) -> Tensor:
        whwh = targets.image_whwh
        predicted = boxes_px / whwh
        true = targets.boxes_px / whwh
        if self.box_format == "xywh":
            predicted = xyxy_to_cxcywh(predicted)
            true = xyxy_to_cxcywh(true)
        predicted, true = _of_pairs(predicted, true)
        return self.weight * (predicted - true).abs().sum(dim=-1)


@TASK_UTILS.register_module()
class IoUCost(MatchCost):
    """The negative IoU or generalised IoU.

    Args:
        iou_mode: 'iou' or 'giou'. weight: factor on the cost.

    Source: Carion et al., DETR; names and defaults are mmdet's.
    """

    box_dim = 4

    def __init__(self, iou_mode: Literal["iou", "giou"] = "giou", weight: float = 1.0) -> None:
        super().__init__(weight)
        self.iou_mode = iou_mode

    def pairwise(self, logits: Tensor, boxes_px: Tensor, targets: PaddedTargets) -> Tensor:
        predicted, true = _of_pairs(boxes_px, targets.boxes_px)
        return -self.weight * elementwise_overlaps(predicted, true, mode=self.iou_mode)


_CODER = RotatedBoxCoder()


@TASK_UTILS.register_module()
class RotatedBoxCost(MatchCost):
    """A loss of rotated boxes, for every pair.

    Args:
        loss: config of a ``RotatedL1Loss``, ``GDLoss`` or ``RotatedIoULoss``. weight: factor on the cost.
    """

    box_dim = 5

    def __init__(self, loss: dict[str, Any] | RotatedLoss, weight: float = 1.0) -> None:
        super().__init__(weight)
        self.loss: RotatedLoss = built(loss, MODELS)

    def pairwise(self, logits: Tensor, boxes_px: Tensor, targets: PaddedTargets) -> Tensor:
        predicted = boxes_px
        true = targets.boxes_px
        is_in_pixels = self.loss.is_in_pixels
        if not is_in_pixels:
            predicted = _CODER.to_unit(predicted, targets.image_whwh)
            true = _CODER.to_unit(true, targets.image_whwh)
        cost = self.loss.elements(*_of_pairs(predicted, true))
        return self.weight * (cost if is_in_pixels else cost.sum(-1))


def _of_pairs(predicted: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Return boxes [..., Q, D] and [..., N, D] as [..., Q, 1, D] and [..., 1, N, D], which are broadcast to all pairs.

    In memory, each coordinate is a plane, and so it is in what is computed of them. A CPU then computes along the
    pairs, and not along the few coordinates of each.
    """
    predicted, true = (boxes.mT.contiguous().mT for boxes in (predicted, true))
    return predicted.unsqueeze(-2), true.unsqueeze(-3)


def _of_target_class(values: Tensor, labels: Tensor) -> Tensor:
    """Return, for the class of each target, the values of all predictions.

    Args:
        values: [..., Q, C].
        labels: [..., N], which may have fewer leading axes.

    Returns:
        [..., Q, N].
    """
    index = labels.unsqueeze(-2).expand(*values.shape[:-1], labels.shape[-1])
    return at_least_float32(values).gather(-1, index)


@TASK_UTILS.register_module()
class HungarianAssigner:
    """Matches ground-truth boxes one-to-one with predictions so that the total cost is least.

    If there are fewer predictions than boxes, some boxes stay without a prediction. A NaN or infinite cost counts as
    1e8, so that a diverging model is noticed by its loss and does not stop the solver.

    Args:
        match_costs: a cost, its config, or a list of either. The costs are added.

    Source: Carion et al., DETR, ECCV 2020.
    """

    @with_other_names(
        dict.fromkeys(("cls_cost", "reg_cost", "iou_cost"), "match_costs=[dict(type=...), ...]")
    )
    def __init__(
        self, match_costs: Sequence[dict[str, Any] | MatchCost] | dict[str, Any] | MatchCost
    ) -> None:
        if isinstance(match_costs, (dict, MatchCost)):
            match_costs = [match_costs]
        self.match_costs = [built(cost, TASK_UTILS) for cost in match_costs]

    def cost(self, logits: Tensor, boxes_px: Tensor, targets: PaddedTargets) -> Tensor:
        """Return the total cost [..., Q, N] of logits [..., Q, C] and boxes [..., Q, box_dim] in pixels."""
        costs = [cost.pairwise(logits, boxes_px, targets) for cost in self.match_costs]
        return sum(costs[1:], start=costs[0])
