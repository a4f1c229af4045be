"""Weighting and reduction of the elements of a loss."""

from torch import Tensor

from visdet.errors import check_choice


def reduce_loss(
    loss: Tensor, weight: Tensor | None, reduction: str, avg_factor: float | Tensor | None = None
) -> Tensor:
    """Return the weighted elements, their sum, or their mean.

    Args:
        loss: [...]. weight: broadcast against ``loss``, or None.
        reduction: 'none', 'mean' or 'sum'. The mean of no elements is 0.
        avg_factor: with 'mean', it divides the sum in place of the number of elements. 'none' ignores it.

    Raises:
        ValueError: the reduction is unknown, or it is 'sum' and ``avg_factor`` is given.
    """
    check_choice("reduction", reduction, ("none", "mean", "sum"))
    if weight is not None:
        loss = loss * weight
    if reduction == "none":
        return loss
    if avg_factor is None:
        return loss.sum() if reduction == "sum" else loss.sum() / max(loss.numel(), 1)
    if reduction == "sum":
        raise ValueError("avg_factor must be None with reduction='sum'")
    return loss.sum() / avg_factor
