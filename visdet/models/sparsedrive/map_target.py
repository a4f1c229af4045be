"""Targets of map polylines."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visdet.errors import InvalidTypeError
from visdet.registry import TASK_UTILS

from .base_target import BaseTargetWithDenoising
from .map_assigner import HungarianLinesAssigner

__all__ = ["SparsePoint3DTarget", "normalize_line"]

_EPS_M = 1e-5


def normalize_line(line: Tensor, num_sample: int, roi_size: Sequence[float]) -> Tensor:
    """Return polylines [..., num_sample · 2] (metres about the centre) in 0..1 of a region of ``roi_size`` metres."""
    points = line.unflatten(-1, (num_sample, 2)).unbind(-1)
    normalized = [(x + size / 2) / (size + _EPS_M) for x, size in zip(points, roi_size, strict=True)]
    return torch.stack(normalized, dim=-1).flatten(-2)


@TASK_UTILS.register_module()
class SparsePoint3DTarget(BaseTargetWithDenoising):
    """Matches polylines one to one, each by the equivalent ordering of its points that is nearest to the prediction.

    Args:
        assigner: ``HungarianLinesAssigner`` or its config.
        num_cls: classes. num_sample: points of a polyline.
        roi_size: metres of the region (x, y) in whose units lines are compared.
        num_dn_groups, dn_noise_scale, max_dn_gt, add_neg_dn, num_temp_dn_groups: accepted; polylines have no denoising.

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
        if not isinstance(self.assigner, HungarianLinesAssigner):
            raise InvalidTypeError(
                f"SparsePoint3DTarget: assigner must be a HungarianLinesAssigner or its config, got {assigner!r}"
            )
        self.num_cls = num_cls
        self.num_sample = num_sample
        self.roi_size = tuple(roi_size)

    def normalize_line(self, line: Tensor) -> Tensor:
        """Return polylines [..., num_sample · 2] in 0..1 of the region."""
        return normalize_line(line, self.num_sample, self.roi_size)

    @torch.no_grad()
    def sample_layers(
        self, cls_pred: Tensor, box_pred: Tensor, cls_target: Sequence[Tensor], box_target: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the targets of L decoder layers; see the base class.

        Args:
            cls_pred: [L, B, Q, C] logits. box_pred: [L, B, Q, num_sample · 2] metres. cls_target: [N] of each sample.
            box_target: of each sample the orderings of each line, [N, orderings, num_sample, 2] or with the last two
                axes as one; a line with fewer of them is padded far away.
        """
        L, B, Q, C = cls_pred.shape
        device = cls_pred.device
        labels = [label.to(device) for label in cls_target]
        lines = [
            (line.flatten(2) if line.dim() == 4 else line).to(device, torch.float32) for line in box_target
        ]
        samples = [i for i, label in enumerate(labels) if len(label) > 0]
        # All layers of a sample are one long list of predictions: the costs do not know layers.
        scores = cls_pred.transpose(0, 1).flatten(1, 2)
        predicted = self.normalize_line(box_pred.float().transpose(0, 1).flatten(1, 2))
        costs, orderings = [], []
        for i in samples:
            cost, ordering = self.assigner.pairwise(
                {"lines": predicted[i], "scores": scores[i]},
                {"lines": self.normalize_line(lines[i]), "labels": labels[i]},
            )
            costs.append(cost.unflatten(0, (L, Q)))
            orderings.append(ordering)

        cls_out = torch.full((L * B, Q), C, dtype=torch.int64, device=device)
        line_out = torch.zeros(L * B, Q, box_pred.shape[-1], device=device)
        weight_out = torch.zeros_like(line_out)
        pairs = self._assign(costs, samples, B, device)
        for i, ordering, (slot, row, column) in zip(samples, orderings, pairs, strict=True):
            nearest = ordering[slot // B * Q + row, column]
            cls_out[slot, row] = labels[i][column]
            line_out[slot, row] = lines[i][column, nearest]
            weight_out[slot, row] = weight_out.new_ones(())  # a number of the host would wait for the device
        return cls_out.view(L, B, Q), line_out.view(L, B, Q, -1), weight_out.view(L, B, Q, -1)
