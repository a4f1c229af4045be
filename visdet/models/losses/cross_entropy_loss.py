"""Cross-entropy losses."""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from visdet.registry import MODELS

from ..layers.precision import at_least_float32
from .reduced_loss import ReducedLoss, Reduction


@MODELS.register_module()
class CrossEntropyLoss(ReducedLoss):
    """Cross entropy of a softmax over classes, or binary cross entropy of each element.

    The loss is computed in float32, or in float64 for float64 inputs.

    Args:
        use_sigmoid: compute the binary cross entropy of logits against targets in 0..1.
        use_mask: must be False, because there is no mask loss.
        reduction: 'none', 'mean' or 'sum'.
        class_weight: [C], the factor of each class, with ``use_sigmoid`` of its positives.
        loss_weight: factor on the result.

    Raises:
        ValueError: ``use_mask`` is True.

    Source: names and defaults are mmdet's.
    """

    def __init__(
        self,
        use_sigmoid: bool = False,
        use_mask: Literal[False] = False,
        reduction: Reduction = "mean",
        class_weight: Sequence[float] | None = None,
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__(reduction, loss_weight)
        self.use_sigmoid = use_sigmoid
        self.class_weight = class_weight

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row, or of each element with ``use_sigmoid``.

        Args:
            pred: logits [N, C], or [...] with ``use_sigmoid``.
            target: [N] int64. With ``use_sigmoid``, targets of the shape of the logits, which may require a gradient.
        """
        pred = at_least_float32(pred)
        factors = None if self.class_weight is None else pred.new_tensor(self.class_weight)
        if self.use_sigmoid:
            target = target.to(pred.dtype)
            return F.binary_cross_entropy_with_logits(pred, target, pos_weight=factors, reduction="none")
        return F.cross_entropy(pred, target, weight=factors, reduction="none")
