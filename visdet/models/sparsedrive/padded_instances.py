"""The ground truth of the frames of a batch as padded tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from visdet.execution.tensor_tree import ON_HOST

from ..matching.padded_targets import room_for
from ..transfer import to_device

LEAST_ROOM = 16


@dataclass(frozen=True)
class PaddedInstances:
    """The boxes or lines of a batch. Shorter lists are padded to a common length N with zeros.

    On a GPU, N is a power of two and at least 16, so that batches have few different shapes.

    Attributes:
        labels: [B, N] int64.
        values: float32, encoded boxes [B, N, D] or all orderings of lines [B, N, O, D].
        weights: [B, N, D], the weight of each number in cost and loss.
        counts: number of instances of each sample, without padding.
    """

    labels: Tensor
    values: Tensor
    weights: Tensor
    counts: list[int] = field(metadata=ON_HOST)

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
            padded_rows([row.long() for row in labels], device),
            padded_rows(values, device),
            padded_rows(weights, device),
            counts=[len(row) for row in labels],
        )


def padded_rows(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return tensors [N_i, ...] of all samples on ``device`` as one tensor [B, N, ...], padded with zeros."""
    padded = pad_sequence(list(rows), batch_first=True)
    if device.type != "cpu":
        missing = room_for(padded.shape[1], LEAST_ROOM) - padded.shape[1]
        padded = torch.cat([padded, padded.new_zeros(len(rows), missing, *padded.shape[2:])], 1)
    return to_device(padded, device)


def rows_or_zeros(table: Tensor, index: Tensor) -> Tensor:
    """Return the rows [..., B, Q, D] of a table [B, N, D] at an index [..., B, Q]. Where it is N, they are zeros."""
    rows = F.pad(table, (0, 0, 0, 1)).expand(*index.shape[:-1], -1, -1)
    return rows.gather(-2, index.unsqueeze(-1).expand(*index.shape, table.shape[-1]))
