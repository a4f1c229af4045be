"""Cross-entropy losses."""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS

from ..layers.precision import at_least_float32
from .reduction import reduce_loss


@MODELS.register_module()
class CrossEntropyLoss(nn.Module):
    """Cross entropy of a softmax over classes, or binary cross entropy of each element.

    The loss is computed in float32, or in float64 for float64 inputs.

    Args:
        use_sigmoid: compute the binary cross entropy of logits against targets in 0..1.
        use_mask: must be False, because there is no mask loss.
        reduction: 'none', 'mean' or 'sum'.
        class_weight: [C], the factor of each class. It must be None with ``use_sigmoid``.
        loss_weight: factor on the result.

    Raises:
        ValueError: ``use_mask`` is True, or ``class_weight`` is given with ``use_sigmoid``.

    Source: names and defaults are mmdet's.
    """

    def __init__(
        self,
        use_sigmoid: bool = False,
        use_mask: Literal[False] = False,
        reduction: str = "mean",
        class_weight: Sequence[float] | None = None,
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__()
        if use_sigmoid and class_weight is not None:
            raise InvalidInputError("CrossEntropyLoss: class_weight must be None with use_sigmoid")
        self.use_sigmoid = use_sigmoid
        self.reduction = reduction
        self.class_weight = class_weight
        self.loss_weight = loss_weight

    def forward(
        self,
        cls_score: Tensor,
        label: Tensor,
        weight: Tensor | None = None,
        avg_factor: float | Tensor | None = None,
        reduction_override: str | None = None,
    ) -> Tensor:
        """Return the loss: a scalar, or one number per element for reduction 'none'.

        Args:
            cls_score: logits [N, C], or [...] with ``use_sigmoid``.
            label: [N] int64. With ``use_sigmoid``, targets of the shape of the logits, which may require a gradient.
            weight: [N], or [...] with ``use_sigmoid``.
            avg_factor: divides the sum in place of the number of elements.
            reduction_override: replaces ``reduction`` in this call.
        """
        cls_score = at_least_float32(cls_score)
        if self.use_sigmoid:
            loss = F.binary_cross_entropy_with_logits(cls_score, label.to(cls_score.dtype), reduction="none")
        else:
            factors = None if self.class_weight is None else cls_score.new_tensor(self.class_weight)
            loss = F.cross_entropy(cls_score, label, weight=factors, reduction="none")
        return self.loss_weight * reduce_loss(loss, weight, reduction_override or self.reduction, avg_factor)
