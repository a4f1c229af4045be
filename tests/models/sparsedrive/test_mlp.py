"""The multilayer perceptrons of SparseDrive."""

import torch
from torch import nn

from visdet.models.sparsedrive.mlp import Scale, linear_relu_ln


def test_parameters_have_the_names_of_the_published_sequence():
    torch.manual_seed(0)
    module = nn.Sequential(*linear_relu_ln(8, 2, 2), nn.Linear(8, 3), Scale([2.0] * 3))
    published = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8),
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8),
        nn.Linear(8, 3), Scale([1.0] * 3),
    )  # fmt: skip
    published.load_state_dict(module.state_dict())
    x = torch.randn(5, 8)
    torch.testing.assert_close(module(x), published(x))
