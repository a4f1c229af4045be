"""What the normalisations that have kernels for CUDA alone ask of their tensors."""

import functools

import torch
from torch import Tensor

from ._library import declares, is_loaded
from .tracing import is_traced

__all__ = ["has_kernel", "packed"]

_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def has_kernel(operator: str, input: Tensor) -> bool:
    """Return whether the kernels of ``operator`` can take ``input``, as far as its device and its type say."""
    return (
        input.is_cuda
        and input.dtype in _TYPES
        and input.numel() > 0
        and not is_traced()
        and _is_built(operator)
    )


@functools.cache
def _is_built(operator: str) -> bool:
    return is_loaded("cuda") and declares(operator)


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy at an address from which the kernels can load 16 bytes."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
