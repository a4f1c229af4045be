"""The part that losses of predictions and targets have in common."""

from torch import Tensor, nn

from .reduction import reduce_loss


class ReducedLoss(nn.Module):
    """A loss whose elements are weighted and reduced. A subclass computes the elements.

    Args:
        reduction: 'none', 'mean' or 'sum'.
        loss_weight: factor on the result.

    Source: names and defaults are those of mmdet's losses.
    """

    def __init__(self, reduction: str = "mean", loss_weight: float = 1.0) -> None:
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
        reduction_override: str | None = None,
    ) -> Tensor:
        """Return the loss: a scalar (0 if there are no elements), or the elements for reduction 'none'.

        Args:
            pred, target: see ``elements``.
            weight: factors of the elements, or None. See ``element_weight``.
            avg_factor: divides the sum in place of the number of elements.
            reduction_override: replaces ``reduction`` in this call.
        """
        elements = self.elements(pred, target)
        factors = None if weight is None else self.element_weight(weight, pred)
        reduction = reduction_override or self.reduction
        return self.loss_weight * reduce_loss(elements, factors, reduction, avg_factor)
