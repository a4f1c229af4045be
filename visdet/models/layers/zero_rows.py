"""Rows that are replaced by zeros."""

from typing import Any

import torch
from torch import Tensor

from visdet.ops.tracing import is_traced


def with_zero_rows(rows: Tensor, is_zero: Tensor) -> Tensor:
    """Return the rows [..., C], where those for which ``is_zero`` [...] is True are zeros."""
    is_plain = type(rows) is Tensor and rows.is_cuda and rows.is_contiguous() and not is_traced()
    if is_plain and rows.shape[-1] * rows.element_size() % torch.int64.itemsize == 0:
        return _WithZeroRows.apply(rows, is_zero)
    # masked_fill would copy the values first, and their gradient, too.
    return torch.where(is_zero.unsqueeze(-1), 0.0, rows)


class _WithZeroRows(torch.autograd.Function):
    """Chooses numbers of 8 bytes, because the kernel of torch computes the place of each number."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, is_zero: Tensor) -> Tensor:
        ctx.save_for_backward(is_zero)
        return torch.where(is_zero.unsqueeze(-1), 0, rows.view(torch.int64)).view(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None]:
        (is_zero,) = ctx.saved_tensors
        return with_zero_rows(grad_rows, is_zero), None
