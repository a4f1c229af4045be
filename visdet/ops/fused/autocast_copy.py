"""Copies of activations in autocast's type, written by the kernel that computed the activations."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments import numbers_to
from .._registration import differentiable_once

__all__ = ["can_be_added", "give_copies", "give_rows", "in_autocast_type", "sum_in_autocast_type"]


class _Copies(NamedTuple):
    """What is noted of a tensor: its copy, the sum of ``added`` and it, and the versions of itself and of ``added``."""

    copy: Tensor
    added: Tensor | None
    total: Tensor | None
    version: int
    added_version: int | None


def give_copies(tensor: Tensor, copy: Tensor, added: Tensor | None, total: Tensor | None) -> None:
    """Note a copy of a tensor in another type, and ``total``, the sum of ``added`` and it in that type.

    Both have gradients of their own. A detached tensor has no copies.
    """
    added_version = None if added is None else added._version
    tensor.autocast_copies = _Copies(  # type: ignore[attr-defined]
        copy, added, total, tensor._version, added_version
    )


def _copies_of(tensor: Tensor) -> _Copies | None:
    """Return what is noted of a tensor, unless it has changed since."""
    noted: _Copies | None = getattr(tensor, "autocast_copies", None)
    return None if noted is None or noted.version != tensor._version else noted


def in_autocast_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the copy of a tensor in this type if there is one, and the tensor if not or if it has changed since."""
    noted = _copies_of(tensor)
    return tensor if noted is None or noted.copy.dtype != dtype else noted.copy


def sum_in_autocast_type(tensor: Tensor, added: Tensor) -> Tensor:
    """Return ``tensor + added``, in autocast's type if the kernel that computed the tensor has written it."""
    noted = _copies_of(tensor)
    if (
        noted is None
        or noted.total is None
        or noted.added is not added
        or noted.added_version != added._version
    ):
        return tensor + added
    rows = _rows_of(added)
    total = noted.total
    return total if rows is None else _SumWithRows.apply(total, *rows)


def give_rows(tensor: Tensor, table: Tensor, index: Tensor) -> None:
    """Note that a tensor [..., N, C] depends on rows of a table alone, to which constants have been added.

    Args:
        table: [R, C]. index: [N] int64, the row of each.
    """
    tensor.rows_of_table = table, index  # type: ignore[attr-defined]


def _rows_of(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    return getattr(tensor, "rows_of_table", None)


def can_be_added(tensor: Tensor, added: Tensor | None) -> bool:
    """Return whether a kernel may add ``added`` [B or 1, ..., C] to what it computes from a tensor [B, ..., C]."""
    return (
        type(added) is Tensor
        and added.dtype == torch.float32
        and added.device == tensor.device
        and added.shape[1:] == tensor.shape[1:]
        and len(added) in (1, len(tensor))
        and (not added.requires_grad or _rows_of(added) is not None)
    )


class _SumWithRows(torch.autograd.Function):
    """The gradient of a sum for the table whose rows have been added, without one for each row."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(table)
        return total.view_as(total)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (index,) = ctx.saved_tensors
        rows = numbers_to(ctx.count, index).unsqueeze(1)
        is_row = (
            (rows == index).to(grad.dtype).repeat(1, grad.shape[:-1].numel() // len(index))
        )  # [R, all rows]
        return grad, torch.mm(is_row, grad.flatten(0, -2), out_dtype=torch.float32), None
