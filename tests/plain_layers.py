"""Checks that a model calls its layers: with hooks, adapters, pruning, parametrisations and quantised weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune
from torch.testing import assert_close

from visdet.execution.tensor_tree import tensors_of

LAYERS = (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


class Scaled(nn.Module):
    """A parametrisation that gives other weights."""

    def forward(self, weight):
        return weight * 1.25


def tensors(value):
    """Return all floating tensors in a result."""
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]


def assert_same(found, expected, tolerance=1e-4):
    found, expected = tensors(found), tensors(expected)
    assert found and len(found) == len(expected)
    assert_close(found, expected, rtol=tolerance, atol=tolerance)


def differs(found, expected):
    return any(not torch.allclose(*pair) for pair in zip(tensors(found), tensors(expected), strict=True))


def weights(model):
    """Return each layer with the name of its weight. An attention's own output projection is not torch's to call."""
    found = []
    for layer in model.modules():
        if isinstance(layer, nn.MultiheadAttention):
            found.append((layer, "in_proj_weight"))
        elif isinstance(layer, LAYERS) and not isinstance(layer, NonDynamicallyQuantizableLinear):
            found.append((layer, "weight"))
    return [(layer, name) for layer, name in found if getattr(layer, name) is not None]


@torch.no_grad()
def check_hooks(model, run, unused):
    """A hook on each module is called, and hooks change no number."""
    expected, called = run(model), set()
    names = {module: name for name, module in model.named_modules()}
    handles = [module.register_forward_hook(lambda module, *_: called.add(names[module])) for module in names]
    assert_same(run(model), expected)
    for handle in handles:
        handle.remove()
    missed = {
        name
        for module, name in names.items()
        if name not in called
        and any(True for _ in module.parameters())
        and not isinstance(module, nn.ModuleList | NonDynamicallyQuantizableLinear)
        and not name.startswith(tuple(unused))
    }
    assert not missed, missed
    seen = []
    with register_module_forward_hook(lambda module, *_: seen.append(module)):
        assert_same(run(model), expected)
    assert {names[module] for module in seen} == called


@torch.no_grad()
def check_parametrisations(model, run):
    """The weights that a parametrisation makes are those that count."""
    before, scaled = run(model), copy.deepcopy(model)
    for layer, name in weights(scaled):
        getattr(layer, name).mul_(1.25)
    for layer, name in weights(model):
        parametrize.register_parametrization(layer, name, Scaled())
    found = run(model)
    assert_same(found, run(scaled))
    assert differs(found, before)


def check_pruning(model, run):
    """The weights that a hook makes before each call are those that count, in every training step."""
    before = run(model)
    for layer, name in weights(model):
        mask = torch.ones_like(getattr(layer, name))
        mask.view(-1)[::3] = 0
        prune.custom_from_mask(layer, name, mask)
    for _ in range(2):
        found = run(model)
        sum(tensor.square().sum() for tensor in tensors(found) if tensor.requires_grad).backward()
        with torch.no_grad():
            for layer, name in weights(model):
                getattr(layer, f"{name}_orig").mul_(0.9)
    with torch.no_grad():
        found = run(model)
        for layer, name in weights(model):
            prune.remove(layer, name)
        assert_same(found, run(model))
        assert differs(found, before)


@torch.no_grad()
def check_adapters(model, run, targets):
    """An adapter of peft acts as if its weights had been merged into the layers."""
    peft = pytest.importorskip("peft", reason="needs peft")
    before = run(model)
    config = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.mul_(0.1)
    found = run(model)
    assert differs(found, before)
    for layer in model.modules():
        if hasattr(layer, "merge"):
            layer.merge()
    assert_same(run(model), found)


@torch.no_grad()
def check_quantised_weights(model, run):
    """Linear layers whose weights torchao has quantised count as they are."""
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    found, plain = run(model), copy.deepcopy(model)
    changed = 0
    for layer in plain.modules():
        if isinstance(layer, nn.Linear) and type(layer.weight) is not nn.Parameter:
            layer.weight = nn.Parameter(layer.weight.dequantize())
            changed += 1
    assert changed
    assert_same(found, run(plain))


CHECKS = {
    "hooks": check_hooks,
    "parametrisations": check_parametrisations,
    "pruning": check_pruning,
    "adapters": check_adapters,
    "quantised": check_quantised_weights,
}


def check_layers(check, model, run, unused, shared=()):
    """Run a check. What no prediction calls is ``unused``, and ``shared`` what peft would adapt by half."""
    arguments = {"hooks": (unused,), "adapters": (adaptable(model, (*unused, *shared)),)}
    CHECKS[check](model, run, *arguments.get(check, ()))


def adaptable(model, left_out):
    """Return the names of the layers that peft can adapt."""
    kinds = (nn.Linear, nn.Conv2d, nn.MultiheadAttention, nn.Embedding)
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, kinds)
        and getattr(layer, "groups", 1) == 1
        and not name.startswith(left_out)
        and not name.endswith("attn.out_proj")
    ]
