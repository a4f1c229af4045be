"""Copies of a few numbers from the host to the device."""

from typing import Any

import torch
from torch import Tensor, nn

from visdet.execution.capture import keeps_tables


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which the parameters of a module are."""
    return next(module.parameters()).device


def to_device(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers as a tensor on ``device``, without waiting for the work that is queued there.

    A copy from memory that is not pinned would wait for everything that was launched before it.

    Args:
        numbers: a number, nested lists of numbers, or a tensor.
        device: the device of the result.
        dtype: the dtype of the result. By default, torch infers it.
    """
    tensor = torch.as_tensor(numbers, dtype=dtype)
    if device.type == "cuda" and tensor.device.type == "cpu" and not torch.compiler.is_compiling():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@keeps_tables(max_sizes=64)
def constants_on(device: torch.device, numbers: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return (nested tuples of) numbers on ``device``, where they are copied once."""
    with torch.inference_mode(False), torch.no_grad():
        return to_device(numbers, device, dtype)
