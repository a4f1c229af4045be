"""Small numbers from the host to the device."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return (nested lists of) numbers, or a CPU tensor, on ``device`` without waiting for the work queued there.

    A copy from ordinary memory would first wait for everything launched before it.
    """
    tensor = torch.as_tensor(numbers, dtype=dtype)
    if device.type == "cuda" and not torch.compiler.is_compiling():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
