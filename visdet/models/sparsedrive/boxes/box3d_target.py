"""The targets of boxes, with noisy copies of the true boxes as further queries."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.registry import TASK_UTILS

from ...matching.assignment import for_solver, solve_padded
from ...matching.match_costs import FocalLossCost
from ...matching.padded_targets import room_for
from ...rows import labels_at, rows_or_zeros
from ...transfer import constants_on, to_device
from ..base_target import LEAST_ROOM, BaseTargetWithDenoising, PaddedInstances, PairCosts, padded_rows
from .box3d import encode_box

# Class targets of queries that were made from padding, and of background.
_PADDING = -1
_BACKGROUND = -3


def _grouped(x: Tensor, num_groups: int) -> Tensor:
    """Return x [B, G · n, ...] as [B, G, n, ...]."""
    return x.unflatten(1, (num_groups, -1))


class DenoisingQueries(NamedTuple):
    """The denoising queries of a batch: G groups of n.

    Attributes:
        anchor: [B, G·n, 10].
        reg_target: [B, G·n, 10], the encoded boxes that the queries belong to, and zeros for background.
        cls_target: [B, G·n] int64, less than 0 for background.
        attn_mask: [G·n, G·n] bool, True where a query must not attend to another: to those of other groups, and to
            padding that is there for the shape alone.
        valid_mask: [B, G·n] bool, False for queries that were made from padding.
        id_target: [B, G·n] int64, the track ids, or None.
    """

    anchor: Tensor
    reg_target: Tensor
    cls_target: Tensor
    attn_mask: Tensor
    valid_mask: Tensor
    id_target: Tensor | None


@TASK_UTILS.register_module()
class SparseBox3DTarget(BaseTargetWithDenoising):
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

    There are G groups of denoising queries. A query is a box plus uniform noise within ``dn_noise_scale``. With
    ``add_neg_dn`` there is a second query for each box, which lies one to two scales away and is background. Each
    group is matched with its boxes by L1 distance, because a far query may be the best one. Queries of different
    groups do not attend to one another.

    Source: Sparse4D v3, arXiv 2311.11722; names and defaults are SparseDrive's. Differences: a cost of +infinity
    counts as 1e8, too; the targets of all decoder layers need one copy to the host; denoising without temporal
    groups works on any frame.
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
        super().__init__(num_dn_groups, num_temp_dn_groups)
        self.dn_noise_scale = dn_noise_scale
        self.max_dn_gt = max_dn_gt
        self.add_neg_dn = add_neg_dn
        self.box_weight = box_weight
        self.reg_weights = (1.0,) * 8 + (0.0,) * 2 if reg_weights is None else tuple(reg_weights)
        self.cls_cost = FocalLossCost(alpha, gamma, eps, weight=cls_weight)
        self.cls_wise_reg_weights = {
            int(label): tuple(weights) for label, weights in (cls_wise_reg_weights or {}).items()
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
        boxes = [encode_box(box.cpu()) for box in box_target]
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
            of_class = constants_on(boxes.device, class_weights, boxes.dtype)
            weights = torch.where((labels == label)[:, None], of_class, weights)
        return weights

    def weighted_distance(self, boxes: Tensor, targets: Tensor, weights: Tensor | float) -> Tensor:
        """Return the weighted L1 distance of encoded boxes, whose shapes are broadcast, summed over their numbers."""
        scale = constants_on(boxes.device, self.reg_weights, torch.float32)
        return ((boxes - targets).abs() * (weights * scale)).sum(-1) * self.box_weight

    @torch.no_grad()
    def get_dn_anchors(
        self,
        cls_target: Sequence[Tensor],
        box_target: Sequence[Tensor],
        gt_instance_id: Sequence[Tensor] | None = None,
        pads: bool = False,
    ) -> DenoisingQueries | None:
        """Return the queries of a batch, or None if there are no groups or no boxes.

        A group has as many queries as the sample with most boxes has boxes, and twice as many with ``add_neg_dn``. With
        ``pads``, that number of boxes is rounded up as that of the ground truth on a GPU, but not above ``max_dn_gt``,
        so that there are few shapes.

        Args:
            cls_target: [N] of each sample, on the device of all arguments.
            box_target: [N, 9] of each sample, with yaw in radians. NaN counts as 0.
            gt_instance_id: [N] of each sample. It is only used if there are temporal groups.
        """
        limit = self.max_dn_gt
        if limit <= 0:
            limit = sys.maxsize
        G = self.num_dn_groups
        most = min(max(map(len, cls_target), default=0), limit)
        if G <= 0 or most == 0:
            return None
        device = cls_target[0].device
        N = min(room_for(most, LEAST_ROOM), limit) if pads else most
        labels = padded_rows(cls_target, device, N, _PADDING).long()
        boxes = padded_rows([encode_box(box) for box in box_target], device, N).nan_to_num()
        boxes = torch.where(labels[..., None] < 0, 0.0, boxes)
        scale = to_device(self.dn_noise_scale, device, boxes.dtype)
        of_groups = boxes.repeat(G, 1, 1, 1)  # [G, B, N, 10]
        anchors = of_groups + (torch.rand_like(of_groups) * 2 - 1) * scale
        if self.add_neg_dn:
            distance = torch.rand_like(of_groups) + 1
            sign = torch.where(torch.rand_like(of_groups) > 0.5, 1.0, -1.0)
            anchors = torch.cat([anchors, of_groups + distance * sign * scale], dim=2)

        costs = for_solver(self.weighted_distance(anchors[..., None, :], boxes[:, None], 1.0))
        index = solve_padded(costs, [N] * len(labels))
        n = index.shape[-1]
        index, anchors = (x.transpose(0, 1).flatten(1, 2) for x in (index, anchors))  # [B, G·n, ...]
        dn_labels = labels_at(labels, index, _BACKGROUND)
        is_box = (labels >= 0).repeat(1, G * n // N)
        ids = None
        if gt_instance_id is not None and self.num_temp_dn_groups > 0:
            ids = labels_at(padded_rows(gt_instance_id, device, N, -1).long(), index, -1)
        group = torch.arange(G, device=device).repeat_interleave(n)
        # Nothing attends to the rows that ``pads`` has added, so that they change no other query.
        added = (torch.arange(n, device=device) % N >= most).repeat(G)
        apart = ((group[:, None] != group) | added).fill_diagonal_(False)
        return DenoisingQueries(
            anchors,
            rows_or_zeros(boxes, index),
            dn_labels,
            apart,
            (dn_labels >= 0) | (is_box & (dn_labels == _BACKGROUND)),
            ids,
        )

    def update_dn(
        self,
        instance_feature: Tensor,
        anchor: Tensor,
        queries: DenoisingQueries,
        num_normal_anchor: int,
        temporal_valid_mask: Tensor,
        state: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor, DenoisingQueries]:
        """Replace the first groups of queries by those that were kept from the previous frame.

        The target of a kept query is the box of this frame that has its id, or background if there is none. Ids must be
        unique within a group.

        Args:
            instance_feature: [B, N + G·n, C]. anchor: [B, N + G·n, D]. The first N rows are no denoising queries.
            queries: those of this frame, which have ids. num_normal_anchor: N.
            temporal_valid_mask: [B] bool, whether a sample has history.
            state: the result of ``cache_dn`` for the previous frame, with its anchors moved to this frame.

        Returns:
            The first three arguments, with the kept queries in them.
        """
        own_ids: Any = queries.id_target
        N = num_normal_anchor
        of_queries = queries.reg_target, queries.cls_target, queries.valid_mask, own_ids
        own = instance_feature[:, N:], anchor[:, N:], *of_queries
        of_frame = [_grouped(x, self.num_dn_groups) for x in own]
        _, _, reg_target, _, _, ids = of_frame
        state_ids = state["dn_id_target"]
        T = state_ids.shape[1]  # temporal groups
        is_same = state_ids[..., None] == ids[:, :T, None]  # [B, T, n before, n]
        cls_target = torch.where(is_same.any(-1), state["dn_cls_target"], _PADDING)
        of_state = (
            state["dn_instance_feature"],
            state["dn_anchor"],
            torch.einsum("btij,btjd->btid", is_same.to(reg_target.dtype), reg_target[:, :T]),
            cls_target,
            state["valid_mask"],
            state_ids,
        )
        merged = []
        for old, new in zip(of_state, of_frame, strict=True):
            n = new.shape[2]
            has_history = temporal_valid_mask.view(-1, *[1] * (new.dim() - 1))
            # It gets as many queries in a group as there are now, more or fewer.
            old = F.pad(old, (0, 0) * (old.dim() - 3) + (0, n - old.shape[2])).to(new.dtype)
            old = torch.where(has_history, old, new[:, :T])
            merged.append(torch.cat([old, new[:, T:]], dim=1).flatten(1, 2))
        feature, anchors, reg_target, cls_target, valid_mask, ids = merged
        return (
            torch.cat([instance_feature[:, :N], feature], dim=1),
            torch.cat([anchor[:, :N], anchors], dim=1),
            queries._replace(
                reg_target=reg_target, cls_target=cls_target, valid_mask=valid_mask, id_target=ids
            ),
        )

    def cache_dn(
        self, dn_instance_feature: Tensor, dn_anchor: Tensor, queries: DenoisingQueries
    ) -> dict[str, Tensor] | None:
        """Return what the next frame needs of ``num_temp_dn_groups`` groups, which are drawn at random.

        Args:
            dn_instance_feature: [B, G·n, C]. dn_anchor: [B, G·n, D]. queries: those of the frame.

        Returns:
            Features, anchors and targets by name, [B, T, n, ...] of T groups, or None without temporal groups or ids.
        """
        ids = queries.id_target
        if ids is None:
            return None
        G = self.num_dn_groups
        order = torch.rand(G, device=dn_anchor.device).argsort()
        drawn = order[: self.num_temp_dn_groups].sort().values
        values = {
            "dn_instance_feature": dn_instance_feature,
            "dn_anchor": dn_anchor,
            "dn_cls_target": queries.cls_target,
            "valid_mask": queries.valid_mask,
            "dn_id_target": ids,
        }
        return {name: _grouped(value.detach(), G).index_select(1, drawn) for name, value in values.items()}
