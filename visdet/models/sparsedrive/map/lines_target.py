"""The targets of polylines."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visdet.registry import TASK_UTILS, built

from ...matching.assignment import for_solver
from ..base_target import BaseTargetWithDenoising, PaddedInstances, PairCosts
from .lines import normalize_line
from .lines_cost import HungarianLinesAssigner


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
        super().__init__()
        self.assigner: Any = built(assigner, TASK_UTILS)
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
        lines = [line.flatten(2).cpu().float() for line in box_target]
        weights = [line.new_ones(len(line), line.shape[-1]) for line in lines]
        return PaddedInstances.of(cls_target, lines, weights, device)

    @torch.no_grad()
    def pair_costs(self, cls_pred: Tensor, box_pred: Tensor, truth: PaddedInstances) -> PairCosts:
        """Return the costs of lines and their nearest orderings. See the base class."""
        cost, ordering = self.assigner.cost(
            {"lines": self.normalize_line(box_pred.float()), "scores": cls_pred},
            {"lines": self.normalize_line(truth.values), "labels": truth.labels},
        )
        return PairCosts(for_solver(cost), ordering)
