"""What the tests of visdet.compat.transformers share; imported where that is installed, or must be."""

import copy
import importlib
import os

import pytest
import tiny_transformers
import torch
from plain_layers import tensors
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fuzz.problem import generator_of
from visdet.compat.__main__ import families
from visdet.execution.tensor_tree import map_tensors

CHECKS_ALL = os.environ.get("VISDET_CHECK_TRANSFORMERS", "0") not in ("", "0")
if not CHECKS_ALL:
    pytest.importorskip("transformers", reason="transformers is not installed: make check-transformers")

FORMS = ["deformable_detr", "rt_detr_v2", "d_fine", "mask2former", "grounding_dino"]
FAMILIES = families() if CHECKS_ALL else FORMS


class Recorder(TorchDispatchMode):
    """The names of the operators that were called. By default, only those of visdet are noted."""

    def __init__(self, *namespaces):
        super().__init__()
        self.namespaces = namespaces or ("visdet",)
        self.calls = []

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        if function.namespace in self.namespaces:
            self.calls.append(function._opname)
        return function(*args, **(kwargs or {}))


def attention_calls(name):
    """Return the attention modules of a model, each with the arguments of one call."""
    model, inputs, _ = tiny_transformers.build(name)
    calls = []

    def keep(layer, args, kwargs):
        assert not args
        calls.append((layer, kwargs))

    layers = [m for m in model.modules() if {"sampling_offsets", "n_levels"} <= {*dir(m)}]
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        model.eval()(**inputs)
    for hook in hooks:
        hook.remove()
    assert calls
    return calls


def cast(arguments, dtype):
    return map_tensors(lambda one: one.to(dtype) if one.is_floating_point() else one, arguments)


def attend(layer, arguments, dtype, autocast=False):
    """Return an attention module's output and the gradients of its inputs and parameters."""
    kind = torch.float32 if autocast else dtype
    layer = copy.deepcopy(layer).to(kind)
    arguments = map_tensors(torch.Tensor.detach, cast(arguments, kind))
    leaves = [leaf.requires_grad_() for leaf in tensors(arguments)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = layer(**arguments)[0]
    weights = torch.randn(output.shape, generator=generator_of(5))
    grads = torch.autograd.grad(
        (output.double() * weights).sum(), [*leaves, *layer.parameters()], allow_unused=True
    )
    return [output.detach(), *(grad for grad in grads if grad is not None)]


def modeling(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")
