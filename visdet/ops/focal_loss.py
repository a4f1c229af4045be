"""Focal losses for integer class targets, with independent classes (sigmoid) or exclusive ones (softmax)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _registration
from ._arguments import check_that, computation_dtype, is_index, numbers_to, widened
from ._declared import declared
from ._modules import OperatorModule

__all__ = [
    "SigmoidFocalLoss",
    "SoftmaxFocalLoss",
    "sigmoid_focal_loss",
    "sigmoid_focal_loss_reference",
    "softmax_focal_loss",
]


@declared(
    input="floating [N, C]",
    target="integers [N]",
    gamma="number",
    alpha="number, at least 0, at most 1",
    weight="None or real [C]",
    reduction="one of 'none', 'mean', 'sum'",
)
def sigmoid_focal_loss(
    input: Tensor,  # [N, C]
    target: Tensor,  # [N] int64 in 0..C, C: background
    gamma: float = 2.0,
    alpha: float = 0.25,
    weight: Tensor | None = None,  # [C]
    reduction: str = "mean",
) -> Tensor:  # [N, C] or a scalar
    """Return the focal loss of each logit: -α (1-p)^γ log p for the target's class, -(1-α) p^γ log(1-p) for others.

    Args:
        input: [N, C]. The logits. 16-bit types are computed in float32.
        target: [N], integers. The class of each row. A number that is no class (C by convention) stands for background.
        gamma: γ, the exponent.
        alpha: α, the weight of the target's class, from 0 to 1.
        weight: [C]. A factor of all losses of a row, chosen by the row's target; background has the factor 1.
        reduction: 'none' gives [N, C], 'sum' the sum, and 'mean' the sum divided by N, not by N * C.

    Returns:
        [N, C] or a scalar. The losses, or a scalar, in the type of ``input``. log p is exact for large logits, too,
        where mmcv cuts it at -87.3. A NaN logit gives NaN.

    It is differentiable once with respect to ``input``; the inputs are saved for the backward. It is deterministic.

    Raises:
        ValueError: A shape, type, ``alpha`` or ``reduction`` does not fit. The message names the argument.

    Source: Focal Loss for Dense Object Detection, arXiv 1708.02002; the signature and the targets are mmcv's.
    """
    dtype = computation_dtype(input)
    weight = input.new_empty(0, dtype=dtype) if weight is None else weight.to(dtype)
    logits = input if reduction == "none" else input.to(dtype)  # so that the sum is not one of rounded losses
    loss = _sigmoid_focal_loss(logits, target.long(), weight, gamma, alpha)
    return _reduce(loss, reduction).to(input)


def sigmoid_focal_loss_reference(
    input: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float
) -> Tensor:
    """Return the losses [N, C] in plain torch: the definition kernels are tested against. No weight: [0]."""
    logits = widened(input, input)
    is_target = target[:, None] == numbers_to(logits.shape[1], logits)
    against = torch.where(is_target, -logits, logits)  # sigmoid of it: how wrong each prediction is
    loss = against.sigmoid().pow(gamma) * -F.logsigmoid(-against)
    loss = torch.where(is_target, alpha * loss, (1 - alpha) * loss)
    if weight.numel() > 0:
        loss = loss * _weight_of_target(weight, target)[:, None]
    return loss.to(input)


@declared(
    input="floating [N, C]",
    target="integers [N]",
    gamma="number",
    alpha="number",
    weight="None or real [C]",
    reduction="one of 'none', 'mean', 'sum'",
)
def softmax_focal_loss(
    input: Tensor,  # [N, C]
    target: Tensor,  # [N] int64 in 0..C-1, negative: ignored
    gamma: float = 2.0,
    alpha: float = 0.25,
    weight: Tensor | None = None,  # [C]
    reduction: str = "mean",
) -> Tensor:  # [N] or a scalar
    """Return the focal loss of each row, -α (1-p)^γ log p with p the softmax probability of its target.

    Args:
        input: [N, C]. The logits. 16-bit types are computed in float32.
        target: [N], integers. The class of each row. A row with a negative target has loss and gradient 0. A target of
            C or more is a mistake that only a synchronisation could report from CUDA: on every device the row's loss is
            NaN and its gradient 0.
        gamma: γ, the exponent.
        alpha: α, the factor of all losses.
        weight: [C]. A factor of a row's loss, chosen by the row's target.
        reduction: 'none' gives [N], 'sum' the sum, and 'mean' the sum divided by N.

    Returns:
        [N] or a scalar. The losses, or a scalar, in the type of ``input``.

    It is differentiable with respect to ``input``. Plain torch serves it.

    Raises:
        ValueError: A shape, type or ``reduction`` does not fit, or there are no classes; the message names the
            argument.

    Source: The signature and the targets are mmcv's.
    """
    target = target.long()
    logits = widened(input, input)
    C = logits.shape[1]
    check_that(C > 0, "softmax_focal_loss", "input", "have at least one class", input)
    is_class = is_index(target, C)
    logits = logits.masked_fill(~is_class[:, None], 0.0)  # their gradient is 0, whatever stands in the row
    log_p = -F.cross_entropy(logits, target.clamp(0, C - 1), reduction="none")
    # At p = 1, the derivative of a power below 1 would be infinite, and NaN after the product with log p = 0.
    doubt = (1 - log_p.exp()).clamp(min=torch.finfo(log_p.dtype).tiny)
    loss = -alpha * doubt.pow(gamma) * log_p
    if weight is not None:
        loss = loss * _weight_of_target(weight.to(loss), target)
    loss = torch.where(target >= 0, loss, 0.0).masked_fill(target >= C, float("nan"))
    return _reduce(loss, reduction).to(input)


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    """Return the reduced loss. ``mean`` divides by the number of rows and not by the number of elements."""
    if reduction == "none":
        return loss
    total = loss.sum()
    return total / loss.shape[0] if reduction == "mean" else total


def _weight_of_target(weight: Tensor, target: Tensor) -> Tensor:
    """Return weight[target], or 1 for a target that is no class. There is at least one class."""
    C = len(weight)
    return torch.where(is_index(target, C), weight[target.clamp(0, C - 1)], 1.0)


_sigmoid_focal_loss = _registration.differentiable(
    "sigmoid_focal_loss",
    "input [N, C]",
    layouts={"input": "[N, C]"},
    elsewhere=sigmoid_focal_loss_reference,
    needs_library=False,
)


class SigmoidFocalLoss(OperatorModule):
    """A module that calls ``sigmoid_focal_loss`` with its settings. ``weight`` is a buffer."""

    operator = staticmethod(sigmoid_focal_loss)

    def __init__(
        self, gamma: float, alpha: float, weight: Tensor | None = None, reduction: str = "mean"
    ) -> None:
        super().__init__(gamma=gamma, alpha=alpha, reduction=reduction)
        self.weight: Tensor | None
        self.register_buffer("weight", weight)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self._call(input, target, weight=self.weight)


class SoftmaxFocalLoss(SigmoidFocalLoss):
    """A module that calls ``softmax_focal_loss`` with its settings. ``weight`` is a buffer."""

    operator = staticmethod(softmax_focal_loss)
