"""Rows of tables that are chosen by an index."""

import torch.nn.functional as F
from torch import Tensor


def rows_at(index: Tensor, rows: Tensor) -> Tensor:
    """Return the rows [B, K, C] of [B or 1, S, C] at ``index`` [B, K].

    ``take_along_dim`` would fix the number of images in an exported program.
    """
    return rows.expand(index.shape[0], -1, -1).gather(1, index.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


def rows_or_zeros(table: Tensor, index: Tensor) -> Tensor:
    """Return the rows [..., B, Q, D] of a table [B, N, D] at an index [..., B, Q]. Where it is N, they are zeros."""
    rows = F.pad(table, (0, 0, 0, 1)).expand(*index.shape[:-1], -1, -1)
    return rows.take_along_dim(index.unsqueeze(-1), -2)


def labels_at(labels: Tensor, index: Tensor, background: int) -> Tensor:
    """Return the labels [..., B, Q] of [B, N] at an index [..., B, Q]. Where it is N, they are the background."""
    return F.pad(labels, (0, 1), value=background).expand(*index.shape[:-1], -1).gather(-1, index)
