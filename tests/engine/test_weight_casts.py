"""16-bit copies of weights: the values and gradients of autocast, whichever way a function takes a weight."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from visdet.engine.weight_casts import WeightCasts


class Network(nn.Module):
    """Layers whose weights are read once, twice, by keyword, by ``to``, in full precision, and in both precisions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.shared = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.both = nn.Linear(8, 8)
        self.full = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.randn(8))
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        x = F.linear(self.shared(self.shared(x)), weight=self.frozen.weight, bias=self.frozen.bias)
        x = self.both(x) @ self.scale.to(torch.bfloat16).diag()
        x = torch.addmm(self.both.bias, x.flatten(0, 1), self.shared.weight.t())
        with torch.autocast("cpu", enabled=False):
            x = self.full(self.both(x.float()))
        return self.norm(x).square().mean()


@pytest.mark.parametrize("channels_last", [False, True])
def test_values_and_gradients_are_those_of_autocast(channels_last):
    torch.manual_seed(0)
    network, x = Network(), torch.randn(2, 3, 6, 6)
    if channels_last:
        network.conv.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        casts = WeightCasts(network.parameters(), "cpu", lambda w, dtype: torch.empty_like(w, dtype=dtype))
    for _ in range(2):  # the second time with weights that have changed where they lie
        network.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = network(x)
        expected.backward()
        casts.write()
        with torch.autocast("cpu", dtype=torch.bfloat16), casts:
            loss = network(x)
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        learning = {weight: copy for weight, copy in casts.copies.items() if weight.requires_grad}
        gradients = torch.autograd.grad(loss, [*parameters, *learning.values()], allow_unused=True)
        found = dict(zip(parameters, gradients[: len(parameters)], strict=True))
        for weight, gradient in zip(learning, gradients[len(parameters) :], strict=True):
            assert gradient.dtype == torch.bfloat16
            direct = found[weight]
            found[weight] = gradient.float() if direct is None else direct + gradient.float()
        assert torch.equal(loss, expected)
        for name, parameter in network.named_parameters():
            if parameter.grad is None:
                assert found.get(parameter) is None, name
            else:
                torch.testing.assert_close(found[parameter], parameter.grad, rtol=1e-6, atol=1e-9, msg=name)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(1.1)
    copied = {name for name, parameter in network.named_parameters() if parameter in casts.copies}
    layers = {"conv", "shared", "frozen", "both"}
    assert copied == {"scale", *(f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias"))}
    assert network.conv.weight.stride() == casts.copies[network.conv.weight].stride()


def test_without_autocast_weights_are_left_alone():
    network, x = Network(), torch.randn(2, 3, 6, 6)
    casts = WeightCasts(network.parameters(), "cpu", lambda w, dtype: torch.empty_like(w, dtype=dtype))
    with casts:
        network.shared(network.conv(x).flatten(2).transpose(1, 2))
    casts.write()
    assert not casts.copies
