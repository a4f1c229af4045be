"""The question whether a layer may be computed past its ``forward``."""

from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from visdet.ops.tracing import is_traced

_Layer = TypeVar("_Layer", bound=nn.Module)


def is_plain(layer: nn.Module, *kinds: type[_Layer]) -> TypeGuard[_Layer]:
    """Return whether calling a layer does exactly what its class does with the layer's own weights.

    A layer is not plain if it is of another class than ``kinds`` (a subclass, a wrapper, an adapter, or a layer with a
    parametrisation), if its ``forward`` has been replaced, if it or all modules have hooks, or if a parameter is a
    subclass of tensors, as quantised and sharded weights are. Whoever takes the weights of a layer without calling it
    has to ask this first, and otherwise has to call the layer.

    torch 2.10 to 2.14 have no public way to ask a module for its hooks.
    """
    forward = layer.forward
    if type(layer) not in kinds or getattr(forward, "__func__", None) is not type(layer).forward:
        return False
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return False
    if _has_any_global_hook() or getattr(forward, "__self__", None) is not layer:
        return False
    # Traces replace parameters by tensors of their own.
    return is_traced() or all(type(x) in (Tensor, nn.Parameter) for x in layer.parameters(recurse=False))


def all_rows(embedding: nn.Module) -> Tensor:
    """Return the rows [N, C] of an embedding, without a call if it is plain."""
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    if is_plain(embedding, nn.Embedding) and embedding.max_norm is None:
        return weight
    return embedding(torch.arange(len(weight), device=weight.device))
