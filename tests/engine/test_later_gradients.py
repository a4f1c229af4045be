"""Gradients of parameters computed beside a backward pass, against autograd's."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from visdet.execution.capture import captures, recomputed
from visdet.execution.later_gradients import LaterGradients


class Model(nn.Module):
    """Uses a layer twice, rows of a weight, a weight outside a layer, and one that others see as another tensor."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.joint = nn.Parameter(torch.randn(12, 6))
        self.last = nn.Linear(6, 3, bias=False)

    def forward(self, x):
        first, second = self.joint.split([4, 8])
        x = self.shared(self.shared(x)) * self.shared.weight.sum()
        x = F.linear(x, first.repeat(1, 1)) @ F.linear(x, second[:4]).transpose(-1, -2)
        return self.last(F.linear(x, second[:, :5].contiguous())[..., :6]).square().sum()


def test_all_gradients_are_those_of_autograd():
    model, x = Model(), torch.randn(2, 5, 6)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x), parameters)

    later = LaterGradients(parameters, [])
    with later.taking():
        found = torch.autograd.grad(model(x), parameters, allow_unused=True)
        later.join()
    sums = [
        torch.zeros_like(parameter) if one is None else one.clone()
        for parameter, one in zip(parameters, found, strict=True)
    ]
    for pairs in later.rounds(list(zip(parameters, sums, strict=True))):
        assert len({place.data_ptr() for place, _ in pairs}) == len(pairs)
        for place, gradient in pairs:
            place += gradient
    assert_close(sums, list(expected), rtol=1e-4, atol=1e-4)
    assert found[-1] is None and later.has_found(model.last.weight)


def test_what_is_computed_again_is_left_to_autograd():
    layers = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6))
    parameters = list(layers.parameters())
    x = torch.randn(2, 5, 6, requires_grad=True)
    expected = torch.autograd.grad(layers(x).sin().sum(), parameters)
    later = LaterGradients(parameters, [])
    with captures(side=None), later.taking():
        found = torch.autograd.grad(recomputed(layers, x).sin().sum(), parameters)
    assert_close(found, expected)
