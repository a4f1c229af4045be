"""Sigmoid focal loss."""

import torch
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.ops import sigmoid_focal_loss
from visdet.registry import MODELS

from ..layers.precision import at_least_float32
from .reduction import reduce_loss

__all__ = ["FocalLoss"]


@MODELS.register_module()
class FocalLoss(nn.Module):
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
        use_sigmoid: bool = True,
        gamma: float = 2.0,
        alpha: float = 0.25,
        reduction: str = "mean",
        loss_weight: float = 1.0,
        activated: bool = False,
    ) -> None:
        super().__init__()
        if not use_sigmoid:
            raise InvalidInputError(
                "FocalLoss: use_sigmoid must be True, there is no softmax focal loss in this class"
            )
        self.use_sigmoid = use_sigmoid
        self.gamma = gamma
        self.alpha = alpha
        self.reduction = reduction
        self.loss_weight = loss_weight
        self.activated = activated

    def forward(
        self,
        pred: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        avg_factor: float | Tensor | None = None,
        reduction_override: str | None = None,
    ) -> Tensor:
        """Return the loss: a scalar, or [N, C] for reduction 'none'.

        Args:
            pred: [N, C] logits, or probabilities if ``activated``. target: [N] int64 in 0..C, where C is background.
            weight: [N] or [N, C]. avg_factor: divides the sum in place of N·C.
            reduction_override: replaces ``reduction`` in this call.
        """
        if pred.dim() != 2 or target.shape != pred.shape[:1]:
            raise ValueError(
                f"FocalLoss: pred must be [N, C] and target [N], got {tuple(pred.shape)} and {tuple(target.shape)}"
            )
        pred = at_least_float32(pred)
        if self.activated:
            pred = pred.logit(eps=torch.finfo(pred.dtype).eps)
        loss = sigmoid_focal_loss(pred, target, self.gamma, self.alpha, reduction="none")
        if weight is not None and weight.dim() == 1:
            weight = weight.unsqueeze(-1)
        return self.loss_weight * reduce_loss(loss, weight, reduction_override or self.reduction, avg_factor)
