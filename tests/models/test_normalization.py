"""Normalisation layers by config name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from tests.fuzz.problem import generator_of
from visdet.models.layers.normalization import BatchNorm2d


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
)
def test_the_layer_is_that_of_torch(device, training, options):
    ours, stock = BatchNorm2d(16, **options).to(device), nn.BatchNorm2d(16, **options).to(device)
    ours.train(training), stock.train(training)
    for seed in range(3):
        generator = generator_of(seed)
        x, residual = (
            torch.randn(2, 16, 6, 5 + seed, generator=generator).to(device, memory_format=torch.channels_last)
            for _ in range(2)
        )
        assert_close(ours(x), stock(x), rtol=1e-5, atol=1e-5)
        expected = F.relu(stock(x) + residual)
        assert_close(ours(x, residual, relu=True), expected, rtol=1e-5, atol=1e-5)
    assert_close(ours.state_dict(), stock.state_dict(), rtol=1e-5, atol=1e-5)
