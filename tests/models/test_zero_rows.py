"""Rows that are replaced by zeros, and their gradients."""

import pytest
import torch

from visdet.models.layers.zero_rows import with_zero_rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [256, 6, 3])
def test_rows_are_zeros_and_give_no_gradients(channels, dtype, device):
    rows = torch.randn(2, 50, channels, device=device, dtype=dtype)
    rows[0, 3] = torch.nan
    rows.requires_grad_()
    is_zero = torch.rand(2, 50, device=device) < 0.3
    is_zero[0, 3] = True
    grad = torch.randn_like(rows)
    found = with_zero_rows(rows, is_zero)
    expected = torch.where(is_zero.unsqueeze(-1), 0.0, rows)
    assert found.dtype == dtype and torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(one, rows, grad)[0] for one in (found, expected)))
