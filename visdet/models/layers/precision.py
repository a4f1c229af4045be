"""Parts that autocast must leave alone."""

import torch
from torch import Tensor, nn

__all__ = ["at_least_float32", "in_full_precision"]


def in_full_precision(module: nn.Module, x: Tensor) -> Tensor:
    """Return ``module(x)`` in the type of the module's weights, without autocast: boxes keep their digits."""
    with torch.autocast(x.device.type, enabled=False):
        return module(x.to(next(module.parameters()).dtype))


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or as it is where its type is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
