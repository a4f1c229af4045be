"""Regression losses of boxes."""

from torch import Tensor, nn

from visdet.registry import MODELS

from ..boxes import elementwise_overlaps
from .reduction import reduce_loss

__all__ = ["GIoULoss", "L1Loss"]


@MODELS.register_module()
class L1Loss(nn.Module):
    """|pred - target| of each coordinate.

    Args:
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.

    Source: names and defaults are mmdet's.
    """

    def __init__(self, reduction: str = "mean", loss_weight: float = 1.0) -> None:
        super().__init__()
        self.reduction = reduction
        self.loss_weight = loss_weight

    def forward(
        self,
        pred: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        avg_factor: float | Tensor | None = None,
        reduction_override: str | None = None,
    ) -> Tensor:
        """Return the loss: a scalar (0 if there are no coordinates), or [...] for reduction 'none'.

        Args:
            pred, target: [...], of the same shape.
            weight: broadcast against ``pred``, or None.
            avg_factor: divides the sum in place of the number of coordinates.
            reduction_override: replaces ``reduction`` in this call.
        """
        if pred.shape != target.shape:
            raise ValueError(
                f"L1Loss: pred and target must have one shape, got {tuple(pred.shape)} and {tuple(target.shape)}"
            )
        loss = (pred - target).abs()
        return self.loss_weight * reduce_loss(loss, weight, reduction_override or self.reduction, avg_factor)


@MODELS.register_module()
class GIoULoss(nn.Module):
    """1 - GIoU of each pair of boxes, in [0, 2]; see ``elementwise_overlaps``.

    Args:
        eps: the least value of a denominator, in the square of the boxes' unit.
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.

    Source: Rezatofighi et al., CVPR 2019; names and defaults are mmdet's.
    """

    def __init__(self, eps: float = 1e-6, reduction: str = "mean", loss_weight: float = 1.0) -> None:
        super().__init__()
        self.eps = eps
        self.reduction = reduction
        self.loss_weight = loss_weight

    def forward(
        self,
        pred: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        avg_factor: float | Tensor | None = None,
        reduction_override: str | None = None,
    ) -> Tensor:
        """Return the loss: a scalar (0 if there are no boxes), or [...] for reduction 'none'.

        Args:
            pred, target: [..., 4] (x1, y1, x2, y2), in the same unit.
            weight: [...], or [..., 4], of which the mean over the last axis is used.
            avg_factor: divides the sum in place of the number of boxes.
            reduction_override: replaces ``reduction`` in this call.
        """
        if pred.shape != target.shape or pred.shape[-1] != 4:
            raise ValueError(
                f"GIoULoss: pred and target must be [..., 4], got {tuple(pred.shape)} and {tuple(target.shape)}"
            )
        loss = 1 - elementwise_overlaps(pred, target, mode="giou", eps=self.eps)
        if weight is not None and weight.dim() == pred.dim():
            weight = weight.mean(dim=-1)
        return self.loss_weight * reduce_loss(loss, weight, reduction_override or self.reduction, avg_factor)
