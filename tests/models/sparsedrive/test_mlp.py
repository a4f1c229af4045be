"""The multilayer perceptrons of SparseDrive."""

import pytest
import torch
import torch.nn.functional as F

from visdet.models.sparsedrive.mlp import Linear


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("shape", [(32,), (0, 32), (2, 5, 32)])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("channels", [32, 33])
def test_a_linear_layer_of_any_width(device, shape, learns, channels):
    layer = Linear(32, channels).to(device)
    x = torch.randn(shape, device=device)
    with torch.set_grad_enabled(learns):
        y = layer(x)
    assert y.requires_grad == learns
    torch.testing.assert_close(y, F.linear(x, layer.weight, layer.bias))
