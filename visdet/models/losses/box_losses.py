"""Regression losses of boxes."""

import torch.nn.functional as F
from torch import Tensor

from visdet.registry import MODELS

from ..boxes import elementwise_overlaps
from .reduced_loss import ReducedLoss, Reduction


@MODELS.register_module()
class L1Loss(ReducedLoss):
    """Absolute difference of prediction and target in each coordinate.

    Args:
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.

    Source: names and defaults are mmdet's.
    """

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each coordinate [...] from pred and target [...], which have one shape."""
        return F.l1_loss(pred, target, reduction="none")


@MODELS.register_module()
class GIoULoss(ReducedLoss):
    """1 - GIoU of each pair of boxes, in [0, 2]; see ``elementwise_overlaps``.

    Args:
        eps: the least value of a denominator, in the square of the boxes' unit.
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.

    Source: Rezatofighi et al., CVPR 2019; names and defaults are mmdet's.
    """

    def __init__(self, eps: float = 1e-6, reduction: Reduction = "mean", loss_weight: float = 1.0) -> None:
        super().__init__(reduction, loss_weight)
        self.eps = eps

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each pair [...] of boxes pred and target [..., 4] (x1, y1, x2, y2), in the same unit."""
        if pred.shape != target.shape or pred.shape[-1] != 4:
            raise ValueError(
                f"GIoULoss: pred and target must be [..., 4], got {tuple(pred.shape)} and {tuple(target.shape)}"
            )
        return 1 - elementwise_overlaps(pred, target, mode="giou", eps=self.eps)

    def element_weight(self, weight: Tensor, pred: Tensor) -> Tensor:
        """Return the weight [...] of each pair from [...], or from [..., 4] the mean over the last axis."""
        return weight.mean(dim=-1) if weight.dim() == pred.dim() else weight
