"""What the targets of boxes and of polylines share: padded ground truth, and one-to-one assignment of all layers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.errors import InvalidInputError

from ..matching.assignment import mean_count, solve_padded
from ..matching.padded_targets import Counted, room_for
from ..rows import labels_at, rows_or_zeros

LEAST_ROOM = 16


@dataclass(frozen=True, kw_only=True)
class PaddedInstances(Counted):
    """The boxes or lines of a batch. Shorter lists are padded to a common length N with zeros.

    On a GPU, N is a power of two and at least 16, so that batches have few different shapes.

    Attributes:
        values: float32, encoded boxes [B, N, D] or all orderings of lines [B, N, O, D].
        weights: [B, N, D], the weight of each number in cost and loss.
    """

    values: Tensor
    weights: Tensor

    @classmethod
    def of(
        cls,
        labels: Sequence[Tensor],
        values: Sequence[Tensor],
        weights: Sequence[Tensor],
        device: torch.device,
    ) -> "PaddedInstances":
        """Return the instances of a batch on ``device``.

        Args:
            labels: [N_i] of each sample.
            values, weights: the attributes of this class for each sample, without the batch axis and without padding.
            device: the device of the result.
        """
        return cls(
            labels=padded_rows([row.to("cpu", torch.int64) for row in labels], device),
            values=padded_rows(values, device),
            weights=padded_rows(weights, device),
            counts=list(map(len, labels)),
        )


def padded_rows(
    rows: Sequence[Tensor], device: torch.device, room: int | None = None, filler: int = 0
) -> Tensor:
    """Return tensors [N_i, ...] of all samples, which lie on the host, as one [B, N, ...] on ``device``.

    Args:
        rows: the tensors. device: the device of the result.
        room: N. Rows beyond it are left out. By default there is room for all.
        filler: what pads shorter tensors.
    """
    kind = device.type
    copied = kind == "cuda"
    if room is None:
        most = max(map(len, rows))
        room = most if kind == "cpu" else room_for(most, LEAST_ROOM)
    first = rows[0]
    sizes = (len(rows), room, *first.shape[1:])
    # Memory that is pinned at once is written once, and its copy need not wait for the device.
    padded = torch.full(sizes, filler, dtype=first.dtype, pin_memory=copied)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row[:room]
    return padded.to(device, non_blocking=copied)


class InstanceTargets(NamedTuple):
    """What the predictions of a decoder layer, or of L layers with a first dimension more, have to learn.

    Attributes:
        labels: [B, Q] int64, the number of classes for background.
        values: [B, Q, D]. weights: [B, Q, D].
    """

    labels: Tensor
    values: Tensor
    weights: Tensor


class PairCosts(NamedTuple):
    """What it costs to assign instances of the ground truth to predictions.

    Attributes:
        costs: [L, B, N, Q]; see ``for_solver``.
        ordering: [L, B, Q, N], the ordering of each line that is nearest to each prediction. It is None for boxes.
        num_denoising: [2], the numbers of denoising queries that count, before and after those of the previous frame
            have joined. It is None without denoising.
    """

    costs: Tensor
    ordering: Tensor | None = None
    num_denoising: Tensor | None = None


@dataclass(frozen=True)
class Assignment:
    """What the predictions of L decoder layers have to learn.

    Attributes:
        index: [L, B, Q] int64, an instance of the ground truth, or N for predictions without one.
        num_positive: [L] or [L + 2], the numbers of matched predictions in each layer and those of ``num_denoising``,
            averaged over all processes and at least 1.
    """

    index: Tensor
    num_positive: Tensor


def assigned_instances(
    costs: Mapping[str, PairCosts], truth: Mapping[str, PaddedInstances]
) -> dict[str, Assignment]:
    """Return what the predictions of each task have to learn.

    The assignments are solved where the costs are. On a GPU, training waits for the device nowhere. In a distributed
    run, this is the only exchange with other processes until all gradients are there.

    Args:
        costs: the results of ``pair_costs`` by task. truth: the ground truth of these tasks.
    """
    indices = {}
    counts = []
    for name, pairs in costs.items():
        of_pairs = pairs.costs
        num_denoising = pairs.num_denoising
        index = solve_padded(of_pairs, truth[name].lengths)
        indices[name] = index
        count = (index < of_pairs.shape[-2]).sum((1, 2)).float()
        if num_denoising is not None:
            count = torch.cat([count, num_denoising])
        counts.append(count)
    means = mean_count(torch.cat(counts)).split([len(count) for count in counts])
    return {name: Assignment(index, mean) for (name, index), mean in zip(indices.items(), means, strict=True)}


class BaseTargetWithDenoising(ABC):
    """Assigns ground truth to predictions, and makes denoising queries if the subclass can.

    Args:
        num_dn_groups: number of groups of denoising queries.
        num_temp_dn_groups: number of groups that are kept for the next frame.

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

    @abstractmethod
    def ground_truth(
        self, cls_target: Sequence[Tensor], box_target: Sequence[Tensor], device: torch.device
    ) -> PaddedInstances:
        """Return the ground truth of a batch on ``device``.

        Args:
            cls_target: [N] int64 of each sample.
            box_target: the boxes or lines of each sample, as they are annotated.
        """

    @abstractmethod
    def pair_costs(self, cls_pred: Tensor, box_pred: Tensor, truth: PaddedInstances) -> PairCosts:
        """Return the cost of each pair of a prediction and an instance. All work runs on the device.

        Args:
            cls_pred: [L, B, Q, C] logits. box_pred: [L, B, Q, D]. truth: the ground truth of the batch.
        """

    def targets_of(
        self, index: Tensor, truth: PaddedInstances, ordering: Tensor | None, num_classes: int
    ) -> InstanceTargets:
        """Return the targets of L decoder layers. All work runs on the device.

        Args:
            index: [L, B, Q], the result of ``solve_padded``: an instance of ``truth``, or N for background.
            ordering: that of ``pair_costs``. num_classes: C, the label of background.
        """
        labels = labels_at(truth.labels, index, background=num_classes)
        values = truth.values
        if ordering is None:
            row = index
        else:  # The orderings of all instances are rows of one table.
            nearest = F.pad(ordering, (0, 1)).gather(-1, index.unsqueeze(-1)).squeeze(-1)
            row = index * values.shape[-2] + nearest
            values = values.flatten(1, 2)
        return InstanceTargets(labels, rows_or_zeros(values, row), rows_or_zeros(truth.weights, index))

    def get_dn_anchors(
        self,
        cls_target: Sequence[Tensor],
        box_target: Sequence[Tensor],
        gt_instance_id: Sequence[Tensor] | None = None,
        pads: bool = False,
    ) -> tuple[Any, ...] | None:
        """Return denoising queries, or None if there are none."""
        return None
