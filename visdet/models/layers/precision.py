"""Parts that autocast must leave alone."""

import torch
from torch import Tensor, nn

__all__ = ["as_autocast_input", "at_least_float32", "autocast_dtype", "in_full_precision"]


def in_full_precision(module: nn.Module, x: Tensor) -> Tensor:
    """Return ``module(x)`` in the type of the module's weights, without autocast: boxes keep their digits."""
    with torch.autocast(x.device.type, enabled=False):
        return module(x.to(next(module.parameters()).dtype))


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or as it is where its type is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type to which autocast converts an input of a linear layer or a convolution, if it is on."""
    kind = tensor.device.type
    if tensor.dtype == torch.float32 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def as_autocast_input(tensor: Tensor) -> Tensor:
    """Return the tensor in the type to which autocast converts a linear layer's input; itself without autocast.

    Autocast converts a tensor anew, and its gradient back, for each layer that reads it; this is once for all.
    """
    return tensor.to(autocast_dtype(tensor))
