"""The linear layer of models: torch's, or visdet's operator where rows are many."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from visdet.models.layers.linear import Linear, are_alike, each_of_its_own


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "by_the_operator"), [(8191, False), (8192, True)])
def test_many_rows_are_computed_by_the_operator(rows, by_the_operator):
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


def chains_of(outputs, device="cpu"):
    return [
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs)).to(
            device=device, dtype=torch.float64
        )
        for _ in range(3)
    ]


def test_layers_side_by_side_compute_what_each_does_alone():
    chains, x = chains_of(4), torch.randn(3, 5, 6, dtype=torch.float64)
    assert are_alike(chains)
    parameters = [parameter for chain in chains for parameter in chain.parameters()]
    found, expected = (
        each_of_its_own(chains, x),
        torch.stack([f(row) for f, row in zip(chains, x, strict=True)]),
    )
    assert_close(found, expected)
    gradient = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, parameters, gradient),
        torch.autograd.grad(expected, parameters, gradient),
        strict=True,
    ):
        assert_close(one, other)


def test_other_layers_do_not_go_side_by_side():
    chains = chains_of(4)
    assert not are_alike([*chains, chains_of(5)[0]]) and not are_alike([*chains, chains[0][:2]])
    assert not are_alike([*chains, nn.Sequential(*chains[0][:2], nn.Linear(8, 4, bias=False))])
    chains[1][1].register_forward_hook(lambda *_: None)
    assert not are_alike(chains)
