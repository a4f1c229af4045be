"""Sigmoid focal loss."""

from typing import Literal

import torch
from torch import Tensor

from visdet.ops import sigmoid_focal_loss
from visdet.registry import MODELS

from ..layers.precision import at_least_float32
from .reduced_loss import ReducedLoss, Reduction


@MODELS.register_module()
class FocalLoss(ReducedLoss):
    """Sigmoid focal loss against integer class labels; see ``visdet.ops.sigmoid_focal_loss``.

    The loss is computed in float32, or in float64 for float64 inputs.

    Args:
        use_sigmoid: must be True, because there is no softmax focal loss.
        gamma: the focusing parameter, which reduces the loss of easy predictions.
        alpha: weight of positives. Negatives get 1 - alpha.
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.
        activated: the predictions are probabilities instead of logits.

    Raises:
        ValueError: ``use_sigmoid`` is False.

    Source: names and defaults are mmdet's.
    """

    def __init__(
        self,
        use_sigmoid: Literal[True] = True,
        gamma: float = 2.0,
        alpha: float = 0.25,
        reduction: Reduction = "mean",
        loss_weight: float = 1.0,
        activated: bool = False,
    ) -> None:
        super().__init__(reduction, loss_weight)
        self.use_sigmoid = use_sigmoid
        self.gamma = gamma
        self.alpha = alpha
        self.activated = activated

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss [N, C] of each class.

        Args:
            pred: [N, C] logits, or probabilities if ``activated``. target: [N] int64 in 0..C, where C is background.
        """
        pred = at_least_float32(pred)
        if self.activated:
            pred = pred.logit(eps=torch.finfo(pred.dtype).eps)
        return sigmoid_focal_loss(pred, target, self.gamma, self.alpha, reduction="none")

    def element_weight(self, weight: Tensor, pred: Tensor) -> Tensor:
        """Return the weight of each class from [N, C], or [N, 1] from [N]."""
        return weight.unsqueeze(-1) if weight.dim() == 1 else weight
