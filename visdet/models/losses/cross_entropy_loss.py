"""Cross-entropy losses."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS

from ..layers.precision import at_least_float32
from .reduction import reduce_loss

__all__ = ["CrossEntropyLoss"]


@MODELS.register_module()
class CrossEntropyLoss(nn.Module):
    """Cross entropy of a softmax over classes, or with ``use_sigmoid`` of each probability by itself.

    Args:
        use_sigmoid: binary cross entropy of logits against targets in 0..1.
        use_mask: not offered, must be False.
        reduction: 'none', 'mean' or 'sum'.
        class_weight: [C] factor of each class, softmax only.
        loss_weight: factor on the result.

    Computed in float32 or better. Source: names and defaults are mmdet's.
    """

    def __init__(
        self,
        use_sigmoid: bool = False,
        use_mask: bool = False,
        reduction: str = "mean",
        class_weight: Sequence[float] | None = None,
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__()
        if use_mask:
            raise InvalidInputError("CrossEntropyLoss: use_mask must be False, a mask loss is not offered")
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
            cls_score: logits, [N, C], or [...] with ``use_sigmoid``.
            label: [N] int64, or with ``use_sigmoid`` targets of the logits' shape, differentiable too.
            weight: [N] or [...]. avg_factor: divides the sum in place of the number of elements.
        """
        cls_score = at_least_float32(cls_score)
        if self.use_sigmoid:
            if label.shape != cls_score.shape:
                raise ValueError(
                    "CrossEntropyLoss: label must have the shape of cls_score with use_sigmoid, "
                    f"got {tuple(label.shape)} and {tuple(cls_score.shape)}"
                )
            loss = F.binary_cross_entropy_with_logits(cls_score, label.to(cls_score.dtype), reduction="none")
        else:
            factors = None if self.class_weight is None else cls_score.new_tensor(self.class_weight)
            loss = F.cross_entropy(cls_score, label, weight=factors, reduction="none")
        return self.loss_weight * reduce_loss(loss, weight, reduction_override or self.reduction, avg_factor)
