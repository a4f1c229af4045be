"""Casts of weights in an evaluation under autocast."""

import gc

import torch
from torch import nn

from visdet.engine.loops import living_objects_not_collected, weights_cast_once


def test_a_weight_is_cast_once_in_all_batches():
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    bfloat16 = torch.autocast("cpu", torch.bfloat16)

    def output():
        with torch.no_grad(), bfloat16:
            return layer(x)

    with weights_cast_once():
        first = output()
        assert first.dtype == torch.bfloat16
        assert layer(x).dtype == torch.float32  # Autocast itself is as it was.
        layer.weight.data.zero_()
        assert torch.equal(output(), first)  # The weight was not read again.
    assert not torch.equal(output(), first)


def test_a_training_leaves_living_objects_to_the_collector_afterwards():
    before = gc.get_freeze_count()
    with living_objects_not_collected():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0
