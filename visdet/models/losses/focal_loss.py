"""Sigmoid focal loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.registry import MODELS

from ..layers.precision import at_least_float32
from .reduction import reduce_loss

__all__ = ["FocalLoss", "sigmoid_focal_loss"]


def sigmoid_focal_loss(
    pred: Tensor, target: Tensor, gamma: float = 2.0, alpha: float = 0.25, activated: bool = False
) -> Tensor:
    """Return the focal loss of each class of each prediction, [N, C].

    With p the probability of a class and t = 1 where it is the target's: -α·(1-p)^γ·log(p) for t = 1,
    -(1-α)·p^γ·log(1-p) for t = 0. Computed in float32 or better.

    Args:
        pred: [N, C] logits, or probabilities if ``activated``.
        target: [N] int64 in 0..C; C is background, the target of no class.

    Source: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
    """
    pred = at_least_float32(pred)
    num_classes = pred.shape[-1]
    is_target = (target.unsqueeze(-1) == torch.arange(num_classes, device=target.device)).to(pred.dtype)
    probability = pred if activated else pred.sigmoid()
    cross_entropy = (F.binary_cross_entropy if activated else F.binary_cross_entropy_with_logits)(
        pred, is_target, reduction="none"
    )
    miss = probability + is_target - 2 * probability * is_target  # 1 - p of the target class, p of the others
    balance = (1 - alpha) + (2 * alpha - 1) * is_target
    return balance * miss.pow(gamma) * cross_entropy


@MODELS.register_module()
class FocalLoss(nn.Module):
    """Sigmoid focal loss over integer class targets, see ``sigmoid_focal_loss``.

    Args:
        use_sigmoid: must be True: classes are independent.
        gamma: how strongly easy predictions are discounted. alpha: weight of positives; negatives get 1 - alpha.
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.
        activated: predictions are probabilities, not logits.

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
            raise ValueError("FocalLoss: use_sigmoid must be True, a softmax focal loss does not exist here")
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
            pred: [N, C] logits. target: [N] int64 in 0..C, C for background.
            weight: [N] or [N, C]. avg_factor: divides the sum in place of N·C.
            reduction_override: replaces ``reduction`` in this call.
        """
        if pred.dim() != 2 or target.shape != pred.shape[:1]:
            raise ValueError(
                f"FocalLoss: pred must be [N, C] and target [N], got {tuple(pred.shape)} and {tuple(target.shape)}"
            )
        loss = sigmoid_focal_loss(pred, target, self.gamma, self.alpha, self.activated)
        if weight is not None and weight.dim() == 1:
            weight = weight.unsqueeze(-1)
        return self.loss_weight * reduce_loss(loss, weight, reduction_override or self.reduction, avg_factor)
