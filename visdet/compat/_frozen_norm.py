"""Batch normalisation with fixed statistics, as the detectors' packages define it for their backbones.

The packages compute ``input * scale + shift`` in two passes over memory, and scale and shift by five small kernels.
``frozen_batch_norm`` takes one pass. Its output has float32 as the packages' has, if its input is one of autocast.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from visdet.ops.frozen_batch_norm import frozen_batch_norm

from ._attention import is_recorded

__all__ = ["frozen_forward", "norm_classes"]

_BUFFERS = ("running_mean", "running_var", "weight", "bias")
_HALVES = (torch.float16, torch.bfloat16)


def norm_classes(module: ModuleType) -> list[type[nn.Module]]:
    """Return the classes of frozen norms that a module defines and that compute what this file does."""
    return [
        owner
        for owner in vars(module).values()
        if isinstance(owner, type)
        and issubclass(owner, nn.Module)
        and owner.__module__ == module.__name__
        and owner.__name__.endswith("FrozenBatchNorm2d")
        and "forward" in vars(owner)
        and _computes(owner)
    ]


def frozen_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward of a frozen norm that computes the same in fewer passes over memory."""

    @functools.wraps(original)
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return _normalise(self, x) if _serves(self, x) else original(self, x)

    return forward


def _serves(norm: nn.Module, input: Any) -> bool:
    if type(input) is not Tensor or input.dim() != 4 or torch.compiler.is_compiling() or is_recorded():
        return False
    own = norm._buffers
    first = own.get("weight")
    if type(first) is not Tensor or first.shape != input.shape[1:2] or first.device != input.device:
        return False
    if not (input.dtype == first.dtype or _is_widened(input, first)):
        return False
    for name in _BUFFERS:
        buffer = own.get(name)
        if type(buffer) is not Tensor or buffer.requires_grad or buffer.dtype != first.dtype:
            return False
        if buffer.shape != first.shape or buffer.device != first.device:
            return False
    return True


def _is_widened(input: Tensor, buffer: Tensor) -> bool:
    """Return whether a 16-bit input meets float32 buffers on a GPU, which reads and writes different types at once."""
    return input.is_cuda and input.dtype in _HALVES and buffer.dtype == torch.float32


def _normalise(norm: Any, input: Tensor) -> Tensor:
    mean, variance, weight, bias = (norm._buffers[name] for name in _BUFFERS)
    return frozen_batch_norm(input, weight, bias, mean, variance)


def _computes(owner: type[nn.Module]) -> bool:
    """Return whether a norm of this class computes the same as ``_normalise`` does."""
    norm: Any = owner.__new__(owner)
    nn.Module.__init__(norm)
    generator = torch.Generator("cpu").manual_seed(0)
    for name in _BUFFERS:  # Small variances show another epsilon.
        drawn = torch.rand(3, generator=generator, device="cpu", dtype=torch.float64)
        norm.register_buffer(name, drawn * (1e-4 if name == "running_var" else 1))
    input = torch.rand(2, 3, 2, 2, generator=generator, device="cpu", dtype=torch.float64)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            expected, found = vars(owner)["forward"](norm, input), _normalise(norm, input)
            return torch.allclose(expected, found, rtol=1e-9, atol=1e-9)
    except (AttributeError, NameError, TypeError, ValueError, RuntimeError, LookupError):
        return False
