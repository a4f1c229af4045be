"""Averages of the weights are mmengine's, but for tensors with several names."""

import copy

import mmengine.model
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from visdet.engine.graphs.averages import GraphedAverage
from visdet.engine.optim.averages import ExponentialMovingAverage
from visdet.registry import MODELS


def model_of():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def step(model):
    for weight in model.state_dict().values():
        weight.add_(torch.randn_like(weight) if weight.is_floating_point() else 1)


@pytest.mark.parametrize("options", [{}, {"update_buffers": True}, {"interval": 2, "momentum": 0.3}])
def test_the_averages_are_those_of_mmengine(options, device):
    said = []
    model = model_of().to(device)
    norm = model[1]
    ours = MODELS.build({"type": "ExponentialMovingAverage", "model": model, **options})
    theirs = mmengine.model.ExponentialMovingAverage(copy.deepcopy(model), **options)
    assert type(ours) is ExponentialMovingAverage
    ours.replay = graphed = GraphedAverage(said.append)
    for _ in range(14):
        for average in (ours, theirs):
            average.update_parameters(model)
        step(model)
        if norm.num_batches_tracked == 8:
            norm.running_mean = norm.running_mean + 1  # A model may replace a buffer.
    expected = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    assert (graphed.counts["replayed"] > 2) == norm.weight.is_cuda != bool(said)


@pytest.mark.parametrize("update_buffers", [False, True])
def test_a_tensor_with_several_names_is_averaged_once(update_buffers):
    layer = nn.Linear(2, 2)
    model = nn.ModuleList([layer, layer, nn.Linear(2, 2)])
    average = ExponentialMovingAverage(model, momentum=0.25, update_buffers=update_buffers)
    average.update_parameters(model)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    average.update_parameters(model)
    for name, tensor in average.module.state_dict().items():
        assert_close(tensor, before[name] + 0.25)
