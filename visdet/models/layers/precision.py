"""Control of the precision of single operations under autocast."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

HALF_TYPES = (torch.float16, torch.bfloat16)


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context without autocast on the device of a tensor."""
    return torch.autocast(tensor.device.type, enabled=False)


def in_type_of(module: nn.Module, x: Tensor) -> Tensor:
    """Return a tensor in the dtype of a module's weights."""
    return x.to(next(module.parameters()).dtype)


def in_full_precision(module: nn.Module, x: Tensor) -> Tensor:
    """Return ``module(x)`` without autocast, in the dtype of the module's weights."""
    with without_autocast(x):
        return module(in_type_of(module, x))


@contextmanager
def without_gradients(device: torch.device) -> Iterator[None]:
    """Run a block without gradients. Autocast keeps no casts of weights that a later call with gradients would read."""
    kind = device.type
    enabled = torch.is_autocast_enabled(kind)
    with torch.no_grad(), torch.autocast(kind, enabled=enabled, cache_enabled=False):
        yield


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or as it is if its dtype is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer or a convolution reads a tensor.

    Autocast converts float32 tensors to its own dtype. Without autocast, it is the dtype of the tensor.
    """
    kind = tensor.device.type
    if tensor.dtype == torch.float32 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def as_autocast_input(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype in which a linear layer reads it; see :func:`autocast_dtype`.

    Autocast would convert the tensor, and its gradient back, once for each layer that reads it. After this call, they
    are converted only once.
    """
    return tensor.to(autocast_dtype(tensor))
