"""The regression loss of 3-D boxes."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.registry import MODELS, built

from ...layers.precision import at_least_float32
from ...losses import weight_of_rows
from ...transfer import constants_on
from .box3d import CNS, SIN_YAW, VX, YNS, W, X

_HEADING = slice(SIN_YAW, VX)  # (sin, cos) of the yaw


@MODELS.register_module()
class SparseBox3DLoss(nn.Module):
    """The losses of encoded boxes, of centerness and of yawness, in float32 or better.

    Centerness says how near the predicted centre is, and yawness whether the box faces the right way.

    Args:
        loss_box: loss of the encoded boxes.
        loss_centerness: loss of logits. The target is exp(-distance of the centres in metres).
        loss_yawness: loss of probabilities. The target is 1 if the yaws are less than a quarter turn apart, and else 0.
        cls_allow_reverse: labels of classes whose front and back look alike. For these, the yaw of a target is turned
            by half a turn if the prediction faces away from it.

    Source: Sparse4D v3, arXiv 2311.11722; names are SparseDrive's. Differences: targets are never changed in place, and
    a ``mask`` replaces the selection of rows, which would wait for the device.
    """

    def __init__(
        self,
        loss_box: dict[str, Any] | nn.Module,
        loss_centerness: dict[str, Any] | nn.Module | None = None,
        loss_yawness: dict[str, Any] | nn.Module | None = None,
        cls_allow_reverse: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.loss_box = built(loss_box, MODELS)
        self.loss_cns = built(loss_centerness, MODELS)
        self.loss_yns = built(loss_yawness, MODELS)
        self.cls_allow_reverse = None if cls_allow_reverse is None else tuple(cls_allow_reverse)

    def forward(
        self,
        box: Tensor,
        box_target: Tensor,
        weight: Tensor | None = None,
        avg_factor: float | Tensor | None = None,
        prefix: str = "",
        suffix: str = "",
        quality: Tensor | None = None,
        cls_target: Tensor | None = None,
        mask: Tensor | None = None,
        reduction_override: str | None = None,
    ) -> dict[str, Tensor]:
        """Return ``{prefix}loss_box{suffix}`` and, with ``quality``, also ``…loss_cns…`` and ``…loss_yns…``.

        Args:
            box, box_target: [n, D], encoded boxes of 8 numbers or more. weight: [n, D]. quality: [n, 2], logits.
            avg_factor: the divisor of each sum. cls_target: [n] int64, needed for ``cls_allow_reverse``.
            mask: [n] bool, whether a row counts. With None all rows do.
            reduction_override: replaces the reduction of all three losses. With 'none' they are elements, [n, ...].
        """
        box = at_least_float32(box)
        dtype = box.dtype
        if self.cls_allow_reverse is not None and cls_target is not None:
            box_target = self.reversed_target(box, box_target, cls_target)
        weight = weight_of_rows(weight, mask)
        reduction = {"avg_factor": avg_factor, "reduction_override": reduction_override}
        losses = {f"{prefix}loss_box{suffix}": self.loss_box(box, box_target, weight=weight, **reduction)}
        if quality is None:
            return losses
        quality = at_least_float32(quality)
        rows = None if mask is None else mask.to(dtype)
        distance = torch.linalg.vector_norm(box_target[:, X:W] - box[:, X:W], dim=-1)
        losses[f"{prefix}loss_cns{suffix}"] = self.loss_cns(
            quality[:, CNS], (-distance).exp(), weight=rows, **reduction
        )
        faces_right = (self._yaw_similarity(box, box_target) > 0).to(dtype)
        losses[f"{prefix}loss_yns{suffix}"] = self.loss_yns(
            quality[:, YNS].sigmoid(), faces_right, weight=rows, **reduction
        )
        return losses

    def reversed_target(self, box: Tensor, box_target: Tensor, cls_target: Tensor) -> Tensor:
        """Return the targets, with (sin, cos) negated if the class allows it and the prediction faces away."""
        may_turn = torch.isin(cls_target, constants_on(box.device, self.cls_allow_reverse, torch.int64))
        turn = may_turn & (self._yaw_similarity(box, box_target) < 0)
        heading = box_target[:, _HEADING]
        turned = torch.where(turn[:, None], -heading, heading)
        return torch.cat([box_target[:, :SIN_YAW], turned, box_target[:, VX:]], dim=-1)

    @staticmethod
    def _yaw_similarity(box: Tensor, box_target: Tensor) -> Tensor:
        return F.cosine_similarity(box_target[:, _HEADING], box[:, _HEADING].detach(), dim=-1)
