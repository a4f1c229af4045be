"""Faster linear layers and norms in the layers around deformable attention, whose own forwards are kept.

The forward of such a layer runs as its package wrote it, but it is given a view of the layer instead of the layer. In
the view, visdet's kernel computes a ``LayerNorm`` of many rows on CUDA, and ``_projection`` computes a ``Linear``. All
other attributes are the layer's own. So are these parts if they have hooks or are of another type.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from visdet.ops.dropout_add_layer_norm import dropout_add_layer_norm

from ._attention import is_recorded
from ._bridge import Bridge
from ._projection import has_many_rows, is_untouched, project, project_by_onednn, suits_onednn
from ._requests import asking, is_read, source_of

__all__ = ["layer_classes", "view_layers"]

_PARTS = re.compile(r"norm|fc\d|linear|proj|layers")
_ACTIVATED = re.compile(r"self\.activation_fn\(\s*self\.fc1\(")
_ATTENTION_FUNCTIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_MIN_ROWS = 1024  # on the CPU


def layer_classes(module: ModuleType) -> list[type[nn.Module]]:
    """Return the classes of layers that a module defines and whose forward reads a norm or a linear layer.

    Models are left out: their forwards are wrapped by what records their outputs, and they compute in their layers.
    """
    found = []
    for owner in vars(module).values():
        if not isinstance(owner, type) or not issubclass(owner, nn.Module):
            continue
        if owner.__module__ != module.__name__ or hasattr(owner, "config_class"):
            continue
        code = getattr(_own_forward(owner), "__code__", None)
        # A forward that calls its parent's needs an instance of its class.
        if code is None or "__class__" in code.co_freevars:
            continue
        if any(_PARTS.search(name) for name in code.co_names):
            found.append(owner)
    return found


def view_layers(owner: type[nn.Module], bridge: Bridge, returns_weights: bool) -> None:
    """Let the forward of a class run on a view of its layer, until the bridge is uninstalled.

    Args:
        owner: the class. bridge: the bridge.
        returns_weights: whether layers of its module return attention weights, which hooks may read.
    """
    original, own = vars(owner)["forward"], _own_forward(owner)
    assert own is not None, owner
    forward = _viewed_forward(own, returns_weights)
    if _is_checkpointed(original):  # Then the class wraps it.
        owner.forward = forward  # type: ignore[method-assign]
        super(owner, owner).__init_subclass__()  # type: ignore[misc]
        forward = vars(owner)["forward"]
        owner.forward = original  # type: ignore[method-assign]
    bridge.replace(owner, "forward", forward)


def _own_forward(owner: type[nn.Module]) -> Callable[..., Any] | None:
    """Return the forward as the package wrote it, or None if there is none or something unknown wraps it."""
    forward: Any = vars(owner).get("forward")
    if _is_checkpointed(forward):
        forward = forward.__wrapped__
    return None if hasattr(forward, "__wrapped__") else forward


def _is_checkpointed(forward: Any) -> bool:
    """Return whether a class's base has wrapped its forward when the class was made, for gradient checkpointing.

    Recent versions of ``transformers`` do so. The wrapper compares itself with the forward of its layer's class.
    """
    code = getattr(forward, "__code__", None)
    return getattr(code, "co_name", "") == "forward_with_checkpointing" and hasattr(forward, "__wrapped__")


def _viewed_forward(original: Callable[..., Any], returns_weights: bool = False) -> Callable[..., Any]:
    """Return a forward that runs the original on a view of its layer."""
    activates = _activates_at_once(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self
        if (
            _pays(*args, *kwargs.values())
            and not is_recorded()
            and not _has_any_global_hook()
            and not _is_given_away(self)
        ):
            layer = _View(self, activates)
        if not returns_weights or torch.compiler.is_compiling() or not is_read(self):
            return original(layer, *args, **kwargs)
        with asking():
            return original(layer, *args, **kwargs)

    return forward


def _pays(first: Any = None, *others: Any) -> bool:
    """Return whether parts of a layer are computed faster for this first argument by more than a view costs."""
    if type(first) is not Tensor or first.dim() < 2 or torch.compiler.is_compiling():
        return False
    if first.is_cuda:
        return has_many_rows(first)
    return first.numel() >= _MIN_ROWS * max(first.shape[-1], 1) and not torch.is_grad_enabled()


def _is_given_away(layer: nn.Module) -> bool:
    """Return whether a layer's forward gives the layer to an attention function that ``transformers`` does not have.

    Users register such functions, under names of their own or in the place of others. They may need the layer itself,
    as a key for what they record.
    """
    name = getattr(vars(layer).get("config"), "_attn_implementation", None)
    if name not in _ATTENTION_FUNCTIONS:
        return True
    functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    if name is None or name not in functions:
        return False
    return not source_of(functions[name]).startswith("transformers.")


def _activates_at_once(forward: Callable[..., Any]) -> bool:
    """Return whether a forward uses the output of ``fc1`` only as the argument of ``activation_fn``."""
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    return source.count("self.fc1") == 1 and _ACTIVATED.search(source) is not None


class _View:
    """A layer as its own forward sees it. It has the layer's attributes, and faster parts in the place of some."""

    def __init__(self, layer: Any, fuses_activation: bool) -> None:
        own = vars(self)
        own.update(vars(layer))
        own["_viewed"] = layer
        # Nothing may refer to the view in turn: a cycle would keep the rows of ``fc1`` until Python looks for cycles.
        is_relu = fuses_activation and _is_relu(layer.activation_fn)
        activation = _Activation(layer.activation_fn) if is_relu else None
        for name, part in layer._modules.items():
            if type(part) is nn.ModuleList:
                own[name] = [_faster(each) for each in part]
            else:
                own[name] = _faster(part, activation if name == "fc1" else None)
        if activation:
            own["activation_fn"] = activation

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_viewed"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).pop(name, None)
        setattr(self._viewed, name, value)


class _Activation:
    """A ReLU that returns what ``fc1`` has applied it to already, and otherwise calls the layer's own."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        self._activation = activation
        self._activated: Tensor | None = None

    def apply(self, input: Tensor) -> Tensor:
        """Return the ReLU of a tensor of which nobody else knows, computed in place."""
        # oneDNN's own ReLU would write a zero for a NaN, so that broken weights would not be noticed.
        self._activated = input.relu_()
        return self._activated

    def __call__(self, input: Tensor) -> Tensor:
        activated, self._activated = self._activated, None
        return input if input is activated else self._activation(input)


def _is_relu(activation: Any) -> bool:
    """Return whether an activation is ReLU, and no gradient needs its input."""
    if torch.is_grad_enabled():
        return False
    if isinstance(activation, nn.Module):
        return is_untouched(activation, nn.ReLU)
    return activation in (torch.relu, nn.functional.relu)


def _faster(part: Any, activation: _Activation | None = None) -> Any:
    kind = type(part)
    if kind is nn.LayerNorm:
        return _Norm(part)
    return _Linear(part, activation) if kind is nn.Linear else part


class _Part:
    """A part of a layer. It has the part's attributes and is called in its place."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class _Norm(_Part):
    def __call__(self, input: Tensor) -> Tensor:
        norm: Any = self._part
        if not _suits_kernel(norm, input):
            return norm(input)
        return dropout_add_layer_norm(input, None, norm.weight, norm.bias, eps=norm.eps)


class _Linear(_Part):
    def __init__(self, part: nn.Module, activation: _Activation | None) -> None:
        super().__init__(part)
        self._activation = activation

    def __call__(self, input: Tensor) -> Tensor:
        activation, layer = self._activation, self._part
        if activation is None or not suits_onednn(layer, input):
            return project(layer, input)
        return activation.apply(project_by_onednn(layer, input))


def _suits_kernel(norm: Any, input: Any) -> bool:
    """Return whether visdet's kernel computes a norm of these rows, and takes less time than torch's."""
    if type(input) is not Tensor or not input.is_cuda or not is_untouched(norm, nn.LayerNorm):
        return False
    return (
        type(norm.weight) is type(norm.bias) is nn.Parameter
        and len(norm.normalized_shape) == 1
        and input.shape[-1] == norm.normalized_shape[0]
        and has_many_rows(input)
    )
