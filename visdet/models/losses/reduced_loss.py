"""The part that losses of predictions and targets have in common."""

from typing import Literal

from torch import Tensor, nn

Reduction = Literal["none", "mean", "sum"]


class ReducedLoss(nn.Module):
    """A loss whose elements are weighted and reduced. A subclass computes the elements.

    Args:
        reduction: 'none', 'mean' or 'sum'. The mean of no elements is 0.
        loss_weight: factor on the result.

    Source: names and defaults are those of mmdet's losses.
    """

    def __init__(self, reduction: Reduction = "mean", loss_weight: float = 1.0) -> None:
        super().__init__()
        self.reduction = reduction
        self.loss_weight = loss_weight

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each element."""
        raise NotImplementedError

    def element_weight(self, weight: Tensor, pred: Tensor) -> Tensor:
        """Return ``weight`` in a shape that is broadcast against the elements."""
        return weight

    def forward(
        self,
        pred: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        avg_factor: float | Tensor | None = None,
        reduction_override: Reduction | None = None,
    ) -> Tensor:
        """Return the loss: a scalar (0 if there are no elements), or the elements for reduction 'none'.

        Args:
            pred, target: see ``elements``.
            weight: factors of the elements, or None. See ``element_weight``.
            avg_factor: divides the sum in place of the number of elements, with 'mean'. 'none' ignores it.
            reduction_override: replaces ``reduction`` in this call.

        Raises:
            ValueError: the reduction is 'sum', and ``avg_factor`` is given.
        """
        loss = self.elements(pred, target)
        if weight is not None:
            loss = loss * self.element_weight(weight, pred)
        reduction = reduction_override or self.reduction
        if reduction == "none":
            return self.loss_weight * loss
        if reduction == "sum" and avg_factor is not None:
            raise ValueError("avg_factor must be None with reduction='sum'")
        if reduction == "mean":
            return self.loss_weight * (
                loss.sum() / (max(loss.numel(), 1) if avg_factor is None else avg_factor)
            )
        return self.loss_weight * loss.sum()
