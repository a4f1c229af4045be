"""Targets of 3-D boxes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from visdet.registry import TASK_UTILS

from ...matching.assignment import for_solver
from ...matching.match_costs import FocalLossCost
from ...transfer import constants_on
from ..base_target import PairCosts
from ..padded_instances import PaddedInstances
from .denoising import BoxDenoising


@TASK_UTILS.register_module()
class SparseBox3DTarget(BoxDenoising):
    """Matches boxes one to one by focal cost plus weighted L1 cost, and makes noisy copies of them for denoising.

    A box with a NaN, such as an unknown velocity, is matched after all others, with any prediction that is left. The
    NaN gets weight 0 in the loss, if ``cls_wise_reg_weights`` does not name its class.

    Args:
        cls_weight, alpha, gamma, eps: weight and parameters of the class cost. box_weight: weight of the box cost.
        reg_weights: weight of each number of an encoded box in the cost. By default it is 1, and 0 for the velocity.
        cls_wise_reg_weights: {class: weights}, which replace the weight 1 of the boxes of a class in cost and loss.
        num_dn_groups: number of groups of denoising queries.
        dn_noise_scale: greatest noise of each number of a box.
        max_dn_gt: greatest number of boxes of a sample that are denoised. With 0 all are.
        add_neg_dn: whether each noisy box comes with another one further away, which is background.
        num_temp_dn_groups: number of groups that are kept for the next frame.

    Source: names and defaults are SparseDrive's. Differences: a cost of +infinity counts as 1e8, too; the targets of
    all decoder layers need one copy to the host; denoising without temporal groups works on any frame.
    """

    def __init__(
        self,
        cls_weight: float = 2.0,
        alpha: float = 0.25,
        gamma: float = 2,
        eps: float = 1e-12,
        box_weight: float = 0.25,
        reg_weights: Sequence[float] | None = None,
        cls_wise_reg_weights: dict[int, Sequence[float]] | None = None,
        num_dn_groups: int = 0,
        dn_noise_scale: float | Sequence[float] = 0.5,
        max_dn_gt: int = 32,
        add_neg_dn: bool = True,
        num_temp_dn_groups: int = 0,
    ) -> None:
        weights = [1.0] * 8 + [0.0] * 2 if reg_weights is None else reg_weights
        noise = dn_noise_scale, max_dn_gt, add_neg_dn
        super().__init__(num_dn_groups, num_temp_dn_groups, *noise, box_weight, weights)
        self.cls_cost = FocalLossCost(alpha, gamma, eps, weight=cls_weight)
        self.cls_wise_reg_weights = {
            int(label): list(weights) for label, weights in (cls_wise_reg_weights or {}).items()
        }

    @torch.no_grad()
    def ground_truth(
        self, cls_target: Sequence[Tensor], box_target: Sequence[Tensor], device: torch.device
    ) -> PaddedInstances:
        """Return the boxes of a batch, encoded on the host.

        Args:
            cls_target: [N] of each sample. box_target: [N, D - 1] of each sample, yaw in radians.
            device: the device of the result.
        """
        labels = [label.cpu() for label in cls_target]
        boxes = self.encode_reg_target(box_target, torch.device("cpu"))
        weights = [self._instance_weights(label, box) for label, box in zip(labels, boxes, strict=True)]
        return PaddedInstances.of(labels, boxes, weights, device)

    @torch.no_grad()
    def pair_costs(self, cls_pred: Tensor, box_pred: Tensor, truth: PaddedInstances) -> PairCosts:
        """Return the costs of boxes; see the base class."""
        box_cost = self.weighted_distance(
            box_pred.float().unsqueeze(-2), truth.values.unsqueeze(1), truth.weights.unsqueeze(1)
        )
        return PairCosts(for_solver(self.cls_cost.of_labels(cls_pred, truth.labels) + box_cost))

    def _instance_weights(self, labels: Tensor, boxes: Tensor) -> Tensor:
        """Return [N, D]: what the class asks for, else 0 where a number is NaN and 1 elsewhere."""
        weights = (~boxes.isnan()).to(boxes.dtype)
        for label, class_weights in self.cls_wise_reg_weights.items():
            of_class = constants_on(boxes.device, tuple(class_weights), boxes.dtype)
            weights = torch.where((labels == label)[:, None], of_class, weights)
        return weights
