"""Focal loss against soft targets."""

from torch import Tensor

from visdet.registry import MODELS

from ..layers.precision import at_least_float32
from .reduced_loss import ReducedLoss, Reduction

_EPS = 1e-12


@MODELS.register_module()
class GaussianFocalLoss(ReducedLoss):
    """Focal loss of probabilities p against soft targets t in 0..1.

    It is the sum of ``-log(p)·(1-p)^α`` where t = 1, and of ``-log(1-p)·p^α·(1-t)^γ`` everywhere. The loss is computed
    in float32, or in float64 for float64 inputs.

    Args:
        alpha, gamma: the exponents. reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.

    Source: Law and Deng, CornerNet, ECCV 2018; names and defaults are mmdet's.
    """

    def __init__(
        self, alpha: float = 2.0, gamma: float = 4.0, reduction: Reduction = "mean", loss_weight: float = 1.0
    ) -> None:
        super().__init__(reduction, loss_weight)
        self.alpha = alpha
        self.gamma = gamma

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each of the probabilities pred [...] against target [...]."""
        if pred.shape != target.shape:
            raise ValueError(
                "GaussianFocalLoss: pred and target must have one shape, "
                f"got {tuple(pred.shape)} and {tuple(target.shape)}"
            )
        pred = at_least_float32(pred)
        positive = -(pred + _EPS).log() * (1 - pred).pow(self.alpha) * (target == 1)
        negative = -(1 - pred + _EPS).log() * pred.pow(self.alpha) * (1 - target).pow(self.gamma)
        return positive + negative
