"""What the targets of boxes and of polylines share: one-to-one assignment of a batch and of all decoder layers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visdet.errors import InvalidInputError

from ..matching.assignment import solve_assignments
from ..transfer import to_device

__all__ = ["BaseTargetWithDenoising"]


class BaseTargetWithDenoising(ABC):
    """Assigns ground truth to predictions, and makes denoising queries where the subclass can.

    Args:
        num_dn_groups: groups of denoising queries, 0 for none.
        num_temp_dn_groups: groups carried to the next frame, 0 for none.

    Attributes:
        dn_metas: the carried denoising queries, None for none; the temporal state of a sampler.
        indices: [prediction, ground truth] index pairs of each sample in the last assignment's last decoder layer.

    Source: names are SparseDrive's.
    """

    def __init__(self, num_dn_groups: int = 0, num_temp_dn_groups: int = 0) -> None:
        if num_temp_dn_groups > max(num_dn_groups, 0):
            raise InvalidInputError(
                f"{type(self).__name__}: num_temp_dn_groups must be at most num_dn_groups {num_dn_groups}, "
                f"got {num_temp_dn_groups}"
            )
        self.num_dn_groups = num_dn_groups
        self.num_temp_dn_groups = num_temp_dn_groups
        self.dn_metas: dict[str, Any] | None = None
        self.indices: list[list[Tensor]] = []

    def sample(
        self, cls_pred: Tensor, box_pred: Tensor, cls_target: Sequence[Tensor], box_target: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the class, regression target and regression weight of each prediction of one decoder layer.

        Args:
            cls_pred: [B, Q, C] logits. box_pred: [B, Q, D]. cls_target: of each sample [N], int64.
            box_target: of each sample, in the annotation's form.

        Returns:
            [B, Q] int64 with C for background, [B, Q, D], [B, Q, D].
        """
        labels, boxes, weights = self.sample_layers(cls_pred[None], box_pred[None], cls_target, box_target)
        return labels[0], boxes[0], weights[0]

    @abstractmethod
    def sample_layers(
        self, cls_pred: Tensor, box_pred: Tensor, cls_target: Sequence[Tensor], box_target: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what ``sample`` returns for L decoder layers at once: [L, B, Q], [L, B, Q, D], [L, B, Q, D]."""

    def get_dn_anchors(
        self,
        cls_target: Sequence[Tensor],
        box_target: Sequence[Tensor],
        gt_instance_id: Sequence[Tensor] | None = None,
    ) -> tuple[Any, ...] | None:
        """Return denoising queries, or None where there are none."""
        return None

    def _assign(
        self, costs: Sequence[Tensor], samples: Sequence[int], num_samples: int, device: torch.device
    ) -> list[Tensor]:
        """Solve all assignments, remember ``indices``, and return the matched pairs of each sample.

        Args:
            costs: [L, Q, N_i] of each sample of ``samples``, those with ground truth. num_samples: B.

        Returns:
            For each sample of ``samples`` [3, M] int64 on ``device``: layer · B + sample, prediction, ground truth.
        """
        solved = solve_assignments(costs)
        pairs = [
            np.concatenate(
                [
                    np.stack([np.full_like(r, layer * num_samples + i), r, c])
                    for layer, (r, c) in enumerate(layers)
                ],
                1,
            )
            for i, layers in zip(samples, solved, strict=True)
        ]
        index: Sequence[Tensor] = []
        if pairs:
            counts = [pair.shape[1] for pair in pairs]
            index = to_device(np.concatenate(pairs, axis=1), device).split(counts, dim=1)
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        self.indices = [[nothing, nothing] for _ in range(num_samples)]
        for i, layers, pair in zip(samples, solved, index, strict=True):
            _, rows, columns = pair[:, pair.shape[1] - len(layers[-1][0]) :]
            self.indices[i] = [rows, columns]
        return list(index)
