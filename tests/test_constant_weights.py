"""What models keep of their weights within an evaluation."""

import pytest
import torch
from torch import nn

from visdet.models import ResNet
from visdet.models.layers.multihead_attention import MultiheadAttention
from visdet.structures.constant_weights import computed_once, weights_are_constant, weights_may_change


def test_a_result_is_kept_within_the_block_and_for_its_module_alone():
    calls = []
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    with torch.no_grad(), weights_are_constant():
        for module in (first, second, first):
            assert computed_once(module, lambda module=module: calls.append(module) or module) is module
        assert calls == [first, second]
        with weights_may_change():
            computed_once(first, lambda: calls.append("again"))
        with torch.autocast("cpu", torch.bfloat16):
            computed_once(first, lambda: calls.append("autocast"))
    with torch.no_grad():
        computed_once(first, lambda: calls.append("outside"))
    with weights_are_constant():  # with gradients, each call has a graph of its own
        computed_once(first, lambda: calls.append("gradients"))
    assert calls == [first, second, "again", "autocast", "outside", "gradients"]


def backbone():
    return ResNet(18, base_channels=8).eval(), torch.randn(2, 3, 32, 32)


def attention():
    return MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)


@pytest.mark.parametrize("make", [backbone, attention])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_models_give_the_same_within_the_block(make, is_autocast):
    torch.manual_seed(0)
    model, x = make()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        expected = model(x)
        with weights_are_constant():
            results = [model(x), model(x)]
        for parameter in model.parameters():
            parameter.mul_(2)
        changed = model(x)
    for result in results:
        torch.testing.assert_close(result, expected)
    a, b = (x[-1] if isinstance(x, tuple) else x for x in (changed, expected))
    assert not torch.equal(a, b)


def test_a_backbone_folds_its_norms_once():
    model, x = backbone()
    with torch.no_grad(), weights_are_constant():
        expected = model(x)
        for parameter in model.parameters():
            parameter.mul_(2)  # This is not allowed, and shows that no weight is read again.
        torch.testing.assert_close(model(x), expected)
