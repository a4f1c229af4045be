"""Map elements, which are polylines: the costs of matching them, their targets, losses and decoder."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS, TASK_UTILS

from ..layers.precision import at_least_float32
from ..losses import ReducedLoss, Reduction
from ..matching.assignment import for_solver
from ..matching.match_costs import FocalLossCost
from .base_target import BaseTargetWithDenoising, PaddedInstances, PairCosts
from .boxes.box3d_decoder import select_best


@TASK_UTILS.register_module()
class LinesL1Cost:
    """The L1 or smooth L1 distance of two polylines, averaged over their points.

    If a line has several equivalent orderings of its points, the cost is that of the best one.

    Args:
        weight: factor on the cost.
        beta: the distance below which smooth L1 is quadratic. With 0 it is plain L1.
        permute: whether each annotated line comes in several orderings.

    Source: StreamMapNet; names and defaults are SparseDrive's.
    """

    def __init__(self, weight: float = 1.0, beta: float = 0.0, permute: bool = False) -> None:
        self.weight = weight
        self.beta = beta
        self.permute = permute

    def __call__(self, lines_pred: Tensor, gt_lines: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the cost [..., Q, N] and, with ``permute``, the index of the best ordering [..., Q, N] int64.

        Args:
            lines_pred: [Q, D], where D = 2 · points, or [..., B, Q, D] for a batch.
            gt_lines: [N, D], or [N, orderings, D] with ``permute``. For a batch there is another first axis B.

        Raises:
            ValueError: ``gt_lines`` has another number of axes.
        """
        expected = 3 if self.permute else 2
        if gt_lines.dim() != expected + int(lines_pred.dim() > 2):
            raise InvalidInputError(
                f"LinesL1Cost: gt_lines must have {expected} axes with permute={self.permute}, got {gt_lines.dim()}; "
                "for predictions with leading axes it must have one more"
            )
        flat = gt_lines.flatten(-3, -2) if self.permute else gt_lines
        if self.beta == 0:
            distance = torch.cdist(lines_pred, flat, p=1)
        else:
            predicted, true = torch.broadcast_tensors(lines_pred.unsqueeze(-2), flat.unsqueeze(-3))
            distance = F.smooth_l1_loss(predicted, true, reduction="none", beta=self.beta).sum(-1)
        distance = distance / (lines_pred.shape[-1] // 2) * self.weight
        if not self.permute:
            return distance, None
        best = distance.unflatten(-1, gt_lines.shape[-3:-1]).min(-1)
        return best.values, best.indices


@TASK_UTILS.register_module()
class MapQueriesCost:
    """The sum of a class cost and a line cost.

    Args:
        cls_cost: ``FocalLossCost`` or its config. reg_cost: ``LinesL1Cost`` or its config.

    Source: StreamMapNet; names are SparseDrive's.
    """

    def __init__(
        self, cls_cost: dict[str, Any] | FocalLossCost, reg_cost: dict[str, Any] | LinesL1Cost
    ) -> None:
        self.cls_cost = TASK_UTILS.build(cls_cost) if isinstance(cls_cost, dict) else cls_cost
        self.reg_cost = TASK_UTILS.build(reg_cost) if isinstance(reg_cost, dict) else reg_cost

    def __call__(self, preds: dict[str, Tensor], gts: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the cost [..., Q, N] and, if lines are permuted, also the best orderings; see ``LinesL1Cost``.

        Args:
            preds: ``lines`` [..., Q, D] and ``scores`` [..., Q, C], which are logits.
            gts: ``lines`` as in ``LinesL1Cost`` and ``labels`` [..., N].
        """
        cost, ordering = self.reg_cost(preds["lines"], gts["lines"])
        return self.cls_cost.of_labels(preds["scores"], gts["labels"]) + cost, ordering


@TASK_UTILS.register_module()
class HungarianLinesAssigner:
    """The cost by which polylines are matched one to one. The class is named as in the configs of SparseDrive.

    Args:
        cost: ``MapQueriesCost`` or its config.

    Source: names are SparseDrive's.
    """

    def __init__(self, cost: dict[str, Any] | MapQueriesCost) -> None:
        self.cost = TASK_UTILS.build(cost) if isinstance(cost, dict) else cost


_EPS_M = 1e-5


def normalize_line(line: Tensor, num_sample: int, roi_size: Sequence[float]) -> Tensor:
    """Return polylines [..., num_sample · 2] in 0..1 of a region of ``roi_size`` metres.

    They are given in metres, and the origin is the centre of the region.
    """
    points = line.unflatten(-1, (num_sample, 2)).unbind(-1)
    normalized = [(x + size / 2) / (size + _EPS_M) for x, size in zip(points, roi_size, strict=True)]
    return torch.stack(normalized, dim=-1).flatten(-2)


@TASK_UTILS.register_module()
class SparsePoint3DTarget(BaseTargetWithDenoising):
    """Matches polylines one to one.

    The target of a prediction is that equivalent ordering of the line's points which is nearest to the prediction.

    Args:
        assigner: ``HungarianLinesAssigner`` or its config.
        num_cls: number of classes. num_sample: number of points of a polyline.
        roi_size: the size (x, y) in metres of the region. Lines are normalised to it before they are compared.
        num_dn_groups, dn_noise_scale, max_dn_gt, add_neg_dn, num_temp_dn_groups: accepted for compatibility. There is
            no denoising of polylines.

    Source: names and defaults are SparseDrive's.
    """

    def __init__(
        self,
        assigner: dict[str, Any] | HungarianLinesAssigner | None = None,
        num_dn_groups: int = 0,
        dn_noise_scale: float = 0.5,
        max_dn_gt: int = 32,
        add_neg_dn: bool = True,
        num_temp_dn_groups: int = 0,
        num_cls: int = 3,
        num_sample: int = 20,
        roi_size: Sequence[float] = (30, 60),
    ) -> None:
        super().__init__(num_dn_groups, num_temp_dn_groups)
        self.assigner: Any = TASK_UTILS.build(assigner) if isinstance(assigner, dict) else assigner
        self.num_sample = num_sample
        self.roi_size = tuple(roi_size)

    def normalize_line(self, line: Tensor) -> Tensor:
        """Return polylines [..., num_sample · 2] in 0..1 of the region."""
        return normalize_line(line, self.num_sample, self.roi_size)

    @torch.no_grad()
    def ground_truth(
        self, cls_target: Sequence[Tensor], box_target: Sequence[Tensor], device: torch.device
    ) -> PaddedInstances:
        """Return the lines of a batch.

        Args:
            cls_target: [N] of each sample.
            box_target: [N, orderings, num_sample, 2] of each sample, the orderings of each line in metres. The last two
                axes may be one. If a line has fewer orderings than there is room for, the others must lie far away.
            device: the device of the result.
        """
        lines = [(line.flatten(2) if line.dim() == 4 else line).cpu().float() for line in box_target]
        weights = [line.new_ones(len(line), line.shape[-1]) for line in lines]
        return PaddedInstances.of([label.cpu() for label in cls_target], lines, weights, device)

    @torch.no_grad()
    def pair_costs(self, cls_pred: Tensor, box_pred: Tensor, truth: PaddedInstances) -> PairCosts:
        """Return the costs of lines and their nearest orderings. See the base class."""
        cost, ordering = self.assigner.cost(
            {"lines": self.normalize_line(box_pred.float()), "scores": cls_pred},
            {"lines": self.normalize_line(truth.values), "labels": truth.labels},
        )
        return PairCosts(for_solver(cost), ordering)


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
        loss = (
            F.smooth_l1_loss(pred, target, reduction="none", beta=self.beta)
            if self.beta > 0
            else (pred - target).abs()
        )
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
        self.loss_line = MODELS.build(loss_line) if isinstance(loss_line, dict) else loss_line
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
        if mask is not None:
            weight = mask[:, None].to(line.dtype) if weight is None else weight * mask[:, None]
        loss = self.loss_line(
            normalize_line(line, self.num_sample, self.roi_size),
            normalize_line(line_target, self.num_sample, self.roi_size),
            weight=weight,
            avg_factor=avg_factor,
            reduction_override=reduction_override,
        )
        return {f"{prefix}loss_line{suffix}": loss}


@TASK_UTILS.register_module()
class SparsePoint3DDecoder:
    """Decodes the best polylines of each sample, as many as there are predictions.

    Args:
        coords_dim: number of coordinates of a point.
        score_threshold: least score of a result. With None all results are kept.

    Source: names and defaults are SparseDrive's. One thing differs: ``output_idx`` has an effect.
    """

    def __init__(self, coords_dim: int = 2, score_threshold: float | None = None) -> None:
        self.coords_dim = coords_dim
        self.score_threshold = score_threshold

    @torch.no_grad()
    def select(
        self,
        cls_scores: list[Tensor],
        pts_preds: list[Tensor],
        instance_id: Tensor | None = None,
        quality: list[Tensor | None] | None = None,
        output_idx: int = -1,
    ) -> dict[str, Tensor]:
        """Return ``vectors`` [B, n, points, coords_dim] in metres, ``scores`` and ``labels`` [B, n].

        There is ``is_kept`` [B, n] with a threshold.

        Args:
            cls_scores: [B, Q, C] of each decoder layer, logits.
            pts_preds: [B, Q, points · coords_dim] of each layer, in metres.
            instance_id, quality: accepted for compatibility, without effect.
            output_idx: index of the decoder layer that is decoded.
        """
        logits = cls_scores[output_idx]
        best = select_best(logits, num_output=logits.shape[1])
        points = pts_preds[output_idx].float()
        points = points.gather(1, best.query[..., None].expand(-1, -1, points.shape[-1]))
        results = {
            "vectors": points.unflatten(-1, (-1, self.coords_dim)),
            "scores": best.score,
            "labels": best.label,
        }
        if self.score_threshold is not None:
            results["is_kept"] = best.score >= self.score_threshold
        return results
