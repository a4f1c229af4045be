"""The linear layer of models: torch's, or visdet's operator where rows are many."""

import copy

import pytest
import torch
from torch import nn

from visdet.models.layers.linear import Linear


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "by_the_operator"), [(8191, False), (8192, True)])
def test_many_rows_are_computed_by_the_operator(rows, by_the_operator):
    torch.manual_seed(0)
    layer = Linear(16, 8).cuda()
    stock = copy.deepcopy(layer)
    stock.__class__ = nn.Linear
    input = torch.randn(1, rows, 16, device="cuda")
    grads = []
    for each in (layer, stock):
        with torch.autocast("cuda", torch.bfloat16):
            output = each(input)
        assert ("_AutocastLinear" in str(output.grad_fn)) == (by_the_operator and each is layer)
        output.float().square().sum().backward()
        grads.append([parameter.grad for parameter in each.parameters()])
    for one, other in zip(*grads, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert (one - other).norm() <= 2e-2 * other.norm()
