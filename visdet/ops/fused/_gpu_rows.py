"""What the operators that have kernels for CUDA alone ask of their tensors."""

import functools

import torch
from torch import Tensor
from torch.nn import Parameter

from .._library import declares, explain_failures, is_loaded
from ..tracing import is_traced

__all__ = ["has_kernel", "is_aligned", "is_built", "packed"]

_TYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def has_kernel(operator: str, input: Tensor) -> bool:
    """Return whether the kernels of ``operator`` can take ``input``, as far as its device and its types say.

    Subclasses of tensors, such as shards, have rules for torch's operators alone.
    """
    return (
        type(input) in (Tensor, Parameter)
        and input.is_cuda
        and input.dtype in _TYPES
        and input.numel() > 0
        and not is_traced()
        and is_built(operator)
    )


@functools.cache
def is_built(operator: str) -> bool:
    """Return whether the CUDA library is built and declares ``operator``."""
    if not (is_loaded("cuda") and declares(operator)):
        return False
    explain_failures(operator)
    backward = f"{operator}_backward"
    if hasattr(torch.ops.visdet, backward):
        explain_failures(backward)
    return True


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy at an address from which the kernels can load 16 bytes."""
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor if is_aligned(tensor) else tensor.clone()


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor begins at a multiple of 16 bytes."""
    return tensor.data_ptr() % 16 == 0
