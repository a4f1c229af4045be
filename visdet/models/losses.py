"""Losses of classes and boxes."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.checks.arguments import AtLeast0, Range, also_takes, checked_value
from visdet.ops import diff_iou_rotated_2d, sigmoid_focal_loss
from visdet.registry import MODELS
from visdet.structures.rotated_boxes import parts_of, periodic, turned

from .boxes import area_of, elementwise_overlaps
from .layers.precision import at_least_float32
from .transfer import constants_on

Reduction = Literal["none", "mean", "sum"]


def weight_of_rows(weight: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Return a weight [n, D], by default 1, that is 0 in rows for which ``mask`` [n] is False. With None all count."""
    if mask is None:
        return weight
    return torch.where(mask[:, None], 1.0 if weight is None else weight, 0.0)


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
        if reduction_override is not None:
            checked_value(f"{type(self).__name__}: reduction_override", reduction_override, Reduction)
        loss = self.elements(pred, target)
        if weight is not None:
            loss = loss * self.element_weight(weight, pred)
        reduction = reduction_override or self.reduction
        if reduction == "none":
            return self.loss_weight * loss
        if reduction == "sum" and avg_factor is not None:
            raise ValueError("avg_factor must be None with reduction='sum'")
        total = loss.sum()
        if reduction == "mean":
            total = total / (max(loss.numel(), 1) if avg_factor is None else avg_factor)
        return self.loss_weight * total


@MODELS.register_module()
class L1Loss(ReducedLoss):
    """Absolute difference of prediction and target in each coordinate.

    Args:
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.

    Source: names and defaults are mmdet's.
    """

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each coordinate [...] from pred and target [...], which have one shape."""
        return F.l1_loss(pred, target, reduction="none")


@MODELS.register_module()
class GIoULoss(ReducedLoss):
    """1 - GIoU of each pair of boxes, in [0, 2]; see ``elementwise_overlaps``.

    Args:
        eps: the least value of a denominator, in the square of the boxes' unit.
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.

    Source: Rezatofighi et al., CVPR 2019; names and defaults are mmdet's.
    """

    def __init__(self, eps: float = 1e-6, reduction: Reduction = "mean", loss_weight: float = 1.0) -> None:
        super().__init__(reduction, loss_weight)
        self.eps = eps

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each pair [...] of boxes pred and target [..., 4] (x1, y1, x2, y2), in the same unit."""
        shape = pred.shape
        other = target.shape
        if shape != other or shape[-1] != 4:
            raise ValueError(
                f"GIoULoss: pred and target must be [..., 4], got {tuple(shape)} and {tuple(other)}"
            )
        return 1 - elementwise_overlaps(pred, target, mode="giou", eps=self.eps)

    def element_weight(self, weight: Tensor, pred: Tensor) -> Tensor:
        """Return the weight [...] of each pair from [...], or from [..., 4] the mean over the last axis."""
        return weight.mean(dim=-1) if weight.dim() == pred.dim() else weight


class RotatedLoss(ReducedLoss):
    """A loss of rotated boxes (cx, cy, w, h, angle).

    The angle is that of ``visdet.ops.box_iou_rotated``. Gradients are finite, whatever the boxes are.

    Attributes:
        is_in_pixels: whether the boxes are in pixels, rather than the network's; see ``RotatedBoxCoder``.
    """

    box_dim = 5
    is_in_pixels = True


@MODELS.register_module()
class RotatedL1Loss(RotatedLoss):
    """Absolute differences of the centre, the sides, sin 2θ and cos 2θ of rotated boxes.

    The angle is periodic: half a turn changes nothing.

    Args:
        angle_weight: factor on the differences of sin 2θ and cos 2θ.
        swaps_sides: whether the target (w, h, θ) is also (h, w, θ + 90°), which is the same box, and the one with the
            smaller loss counts. It helps if many objects are nearly square. Long ones are learnt faster without.
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.
    """

    is_in_pixels = False

    def __init__(
        self,
        angle_weight: AtLeast0 = 0.1,
        swaps_sides: bool = False,
        reduction: Reduction = "mean",
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__(reduction, loss_weight)
        self.angle_weight = angle_weight
        self.swaps_sides = swaps_sides

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the six differences [..., 6] of boxes pred and target, which broadcast to [..., 5]."""
        differences = self._differences(pred, target)
        if self.swaps_sides:
            center, sides, angle = parts_of(target)
            swapped = torch.cat((center, sides.flip(-1), angle + math.pi / 2), dim=-1)
            others = self._differences(pred, swapped)
            is_nearer = others.sum(-1, True) < differences.sum(-1, True)
            differences = torch.where(is_nearer, others, differences)
        return differences

    def _differences(self, pred: Tensor, target: Tensor) -> Tensor:
        lengths = (pred[..., :4] - target[..., :4]).abs()
        angles = (periodic(pred[..., 4:]) - periodic(target[..., 4:])).abs()
        return torch.cat((lengths, self.angle_weight * angles), dim=-1)


_LEAST_SIDE = 1e-3  # pixels


@MODELS.register_module()
class GDLoss(RotatedLoss):
    """A distance of the Gaussians that rotated boxes stand for, which have the boxes' centres and axes.

    For 'kld', standard deviations are half the sides, and the loss is 1 - 1 / (tau + log(1 + D)) with the
    Kullback-Leibler divergence D of the prediction from the target. For 'probiou', variances are those of a uniform
    density in the box, and the loss is the Hellinger distance, in 0..1. Neither depends on the unit, and neither knows
    the angle of a square. Sides below 0.001 pixels count as that.

    Args:
        loss_type: 'kld' or 'probiou'. tau: see above.
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.

    Source: Yang et al., NeurIPS 2021, arXiv 2106.01883; Llerena et al., arXiv 2106.06072. Names are mmrotate's, which
    has no 'probiou'.
    """

    @also_takes(fun="log1p", representation="xy_wh_r", alpha=1.0)
    def __init__(
        self,
        loss_type: Literal["kld", "probiou"],
        tau: Annotated[float, Range(1.0)] = 1.0,
        reduction: Reduction = "mean",
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__(reduction, loss_weight)
        self.loss_type = loss_type
        self.tau = tau

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss [...] of each pair of boxes pred and target, which broadcast to [..., 5]."""
        # All is in the frame of the prediction and in units of its sides, so that no number is the difference of large
        # ones.
        center, sides, angle = parts_of(pred)
        true_center, true_sides, true_angle = parts_of(target)
        shift = turned(true_center - center, -angle)
        turn = true_angle - angle
        sides = sides.clamp(min=_LEAST_SIDE)
        true_sides = true_sides.clamp(min=_LEAST_SIDE)
        moved = (shift / sides).square()
        turned_back = turned(shift, -turn) / true_sides
        # The extents of the target along the sides of the prediction, and its area.
        extents = (true_sides * turn.cos()).square() + (true_sides.flip(-1) * turn.sin()).square()
        extents = extents / sides.square()
        area = area_of(true_sides / sides)
        if self.loss_type == "kld":
            divergence = 0.5 * (4 * moved + extents - 1).sum(-1) - area.log()
            return 1 - 1 / (self.tau + divergence.clamp(min=0).log1p())
        determinant = 1 + extents.sum(-1) + area.square()
        shifts = moved + (area.unsqueeze(-1) * turned_back).square()
        distance = 3 * shifts.sum(-1) / determinant + 0.5 * (determinant / (4 * area)).log()
        return (-torch.expm1(-distance)).clamp(min=1e-6).sqrt()


@MODELS.register_module()
class RotatedIoULoss(RotatedLoss):
    """1 - IoU of rotated boxes, in 0..1; see ``visdet.ops.diff_iou_rotated_2d``.

    It has no gradient where the boxes do not overlap. Sides below 0.001 pixels count as that.

    Args:
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.
    """

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss [...] of each pair of boxes pred and target, which broadcast to [..., 5]."""
        pred, target = torch.broadcast_tensors(pred, target)
        center, sides, angle = parts_of(pred)
        pred = torch.cat((center, sides.clamp(min=_LEAST_SIDE), angle), dim=-1)
        overlaps = diff_iou_rotated_2d(pred.reshape(1, -1, 5), target.reshape(1, -1, 5))
        return 1 - overlaps.view(pred.shape[:-1])


@MODELS.register_module()
class FocalLoss(ReducedLoss):
    """Sigmoid focal loss against integer class labels; see ``visdet.ops.sigmoid_focal_loss``.

    The loss is computed in float32, or in float64 for float64 inputs.

    Args:
        use_sigmoid: must be True, because there is no softmax focal loss.
        gamma: the focusing parameter, which reduces the loss of easy predictions.
        alpha: weight of positives. Negatives get 1 - alpha.
        reduction: 'none', 'mean' or 'sum'. loss_weight: factor on the result.
        activated: must be False, because predictions are logits.

    Raises:
        ValueError: ``use_sigmoid`` is False.

    Source: names and defaults are mmdet's.
    """

    def __init__(
        self,
        use_sigmoid: Literal[True] = True,
        gamma: float = 2.0,
        alpha: float = 0.25,
        reduction: Reduction = "mean",
        loss_weight: float = 1.0,
        activated: Literal[False] = False,
    ) -> None:
        super().__init__(reduction, loss_weight)
        self.use_sigmoid = use_sigmoid
        self.gamma = gamma
        self.alpha = alpha

    def elements(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss [N, C] of each class.

        Args:
            pred: [N, C] logits. target: [N] int64 in 0..C, where C is background.
        """
        pred = at_least_float32(pred)
        return sigmoid_focal_loss(pred, target, self.gamma, self.alpha, reduction="none")

    def element_weight(self, weight: Tensor, pred: Tensor) -> Tensor:
        """Return the weight of each class from [N, C], or [N, 1] from [N]."""
        return weight.unsqueeze(-1) if weight.dim() == 1 else weight


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
        shape = pred.shape
        other = target.shape
        if shape != other:
            raise ValueError(
                f"GaussianFocalLoss: pred and target must have one shape, got {tuple(shape)} and {tuple(other)}"
            )
        pred = at_least_float32(pred)
        positive = -(pred + _EPS).log() * (1 - pred).pow(self.alpha) * (target == 1)
        negative = -(1 - pred + _EPS).log() * pred.pow(self.alpha) * (1 - target).pow(self.gamma)
        return positive + negative


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

    @also_takes(ignore_index=None, avg_non_ignore=False)
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
        factors = None
        if self.class_weight is not None:
            factors = constants_on(pred.device, tuple(self.class_weight), pred.dtype)
        if self.use_sigmoid:
            target = target.to(pred.dtype)
            return F.binary_cross_entropy_with_logits(pred, target, pos_weight=factors, reduction="none")
        return F.cross_entropy(pred, target, weight=factors, reduction="none")
