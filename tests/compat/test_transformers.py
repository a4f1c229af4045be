"""transformers' detectors under visdet.compat.transformers compute what stock computes.

One family of each calling form; with VISDET_CHECK_TRANSFORMERS=1 (``make check-transformers``) all that the installed
version has, and nothing is skipped.
"""

import copy

import pytest
import tiny_transformers
import torch
from plain_layers import tensors
from torch.testing import assert_close
from training_steps import assert_gradients_close
from transformers_checks import (
    FAMILIES,
    Recorder,
    attend,
    attention_calls,
    cast,
)

from tests.fuzz.problem import generator_of
from visdet.compat import transformers as bridge


@pytest.fixture(autouse=True)
def uninstalled():
    yield
    bridge.uninstall()


def outputs_and_gradients(name, **options):
    """Return a model's outputs, and its gradients of a random sum of them; before any selection of labels."""
    model, inputs, _ = tiny_transformers.build(name)
    outputs = tensors(model.eval()(**inputs, **options))
    generator = generator_of(3)
    loss = sum(
        (out * torch.randn(out.shape, generator=generator)).nan_to_num(0, 0, 0).sum() for out in outputs
    )
    loss.backward()
    return [out.detach() for out in outputs], {key: p.grad for key, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"output_attentions": True}], ids=["plain", "attentions"])
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_those_of_stock(name, options):
    outputs, grads = outputs_and_gradients(name, **options)
    with bridge.installed(), Recorder() as recorder:
        found, found_grads = outputs_and_gradients(name, **options)
    assert "ms_deform_attn" in recorder.calls
    assert len(found) == len(outputs)
    for one, other in zip(found, outputs, strict=True):
        scale = float(other.nan_to_num(0, 0, 0).abs().max())
        assert_close(one, other, rtol=1e-4, atol=1e-4 * max(scale, 1), equal_nan=True)
    assert_gradients_close(found_grads, grads)


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_no_further_from_float64_than_stock(name, autocast):
    layer, arguments = attention_calls(name)[-1]
    compare_with_float64(layer, arguments, autocast)


def compare_with_float64(layer, arguments, autocast):
    if not autocast:  # what float64 is given is rounded too, so that the arithmetic alone is compared
        layer = copy.deepcopy(layer).to(torch.bfloat16)
        arguments = cast(arguments, torch.bfloat16)
    exact = attend(layer, arguments, torch.float64)
    stock = attend(layer, arguments, torch.bfloat16, autocast)
    with bridge.installed():
        found = attend(layer, arguments, torch.bfloat16, autocast)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in stock]
    total = {"visdet": 0.0, "stock": 0.0}
    for truth, one, other in zip(exact, found, stock, strict=True):
        size = float(truth.norm()) or 1.0
        total["visdet"] += float((one.double() - truth).norm()) / size
        total["stock"] += float((other.double() - truth).norm()) / size
    # Both get locations that a bfloat16 module has rounded. The largest ratio was 1.055.
    assert total["visdet"] <= 1.1 * total["stock"], total
