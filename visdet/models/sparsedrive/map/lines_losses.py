"""The losses of polylines."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from visdet.registry import MODELS, built

from ...layers.precision import at_least_float32
from ...losses import ReducedLoss, Reduction, weight_of_rows
from .lines import normalize_line


@MODELS.register_module()
class LinesL1Loss(ReducedLoss):
    """The smooth L1 loss of polylines, divided by the number of their points.

    Args:
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.
        beta: the distance below which the loss is quadratic. With 0 it is plain L1.

    Source: StreamMapNet; names and defaults are SparseDrive's.
    """

    def __init__(self, reduction: Reduction = "mean", loss_weight: float = 1.0, beta: float = 0.5) -> None:
        super().__init__(reduction, loss_weight)
        self.beta = beta

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each coordinate of polylines pred against target, both [..., 2 · points]."""
        pred = at_least_float32(pred)
        loss = F.smooth_l1_loss(pred, target, reduction="none", beta=self.beta)
        return loss / (pred.shape[-1] // 2)


@MODELS.register_module()
class SparseLineLoss(nn.Module):
    """A loss of polylines, which are first normalised to 0..1 of the region in which they are predicted.

    Args:
        loss_line: loss of the normalised polylines. num_sample: number of points of a polyline.
        roi_size: the size (x, y) of the region in metres.

    Source: names and defaults are SparseDrive's.
    """

    def __init__(
        self,
        loss_line: dict[str, Any] | nn.Module,
        num_sample: int = 20,
        roi_size: Sequence[float] = (30, 60),
    ) -> None:
        super().__init__()
        self.loss_line = built(loss_line, MODELS)
        self.num_sample = num_sample
        self.roi_size = tuple(roi_size)

    def forward(
        self,
        line: Tensor,
        line_target: Tensor,
        weight: Tensor | None = None,
        avg_factor: float | Tensor | None = None,
        prefix: str = "",
        suffix: str = "",
        quality: None = None,
        cls_target: Tensor | None = None,
        mask: Tensor | None = None,
        reduction_override: str | None = None,
    ) -> dict[str, Tensor]:
        """Return ``{prefix}loss_line{suffix}``.

        Args:
            line, line_target: [n, 2 · num_sample], in metres. weight: [n, 2 · num_sample].
            avg_factor: the divisor of the sum. mask: [n] bool, whether a row counts. With None all rows do.
            quality, cls_target: accepted for compatibility, without effect.
            reduction_override: replaces the reduction. With 'none' the loss is elements [n, 2 · num_sample].
        """
        line = at_least_float32(line)
        weight = weight_of_rows(weight, mask)
        loss = self.loss_line(
            normalize_line(line, self.num_sample, self.roi_size),
            normalize_line(line_target, self.num_sample, self.roi_size),
            weight=weight,
            avg_factor=avg_factor,
            reduction_override=reduction_override,
        )
        return {f"{prefix}loss_line{suffix}": loss}
