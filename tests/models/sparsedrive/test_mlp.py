"""The multilayer perceptrons of SparseDrive."""

import torch
from torch import nn
from torch.testing import assert_close

from visdet.models.sparsedrive.mlp import SideBySide, linear_relu_ln


def test_perceptrons_side_by_side(device):
    widths, inputs = (16, 4, 4, 8), (3, 3, 2, 3)
    modules = [
        nn.Sequential(*linear_relu_ln(width, 1, 3, count)).to(device)
        for width, count in zip(widths, inputs, strict=True)
    ]
    for parameter in (p for module in modules for p in module.parameters()):
        nn.init.normal_(parameter)
    assert SideBySide.serves(modules) and not SideBySide.serves([nn.Sequential(*linear_relu_ln(8, 2, 1))])
    together = SideBySide(modules).to(device)
    assert not together.state_dict()
    parts = [torch.randn(2, 5, count, device=device) for count in inputs]
    expected = [module(part) for module, part in zip(modules, parts, strict=True)]
    assert_close(together(modules, parts), expected, rtol=1e-4, atol=1e-4)
