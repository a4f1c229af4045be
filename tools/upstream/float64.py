"""Models in float64, in which two orders of the same sum agree to 1e-15."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

__all__ = ["float32_is_float64", "in_float64"]


@contextmanager
def float32_is_float64() -> Iterator[None]:
    """Let code that asks torch for float32 get float64, and let new tensors be of that type.

    cuDNN's fused kernels, which visdet calls in float32, have no float64.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.multiple(torch, float32=torch.float64, float=torch.float64),
            patch.object(torch.Tensor, "float", torch.Tensor.double),
            torch.backends.cudnn.flags(enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(default)


def in_float64(value: Any) -> Any:
    """Return nested data with all floating-point tensors in float64."""
    if torch.is_tensor(value) and value.is_floating_point():
        return value.double()
    if isinstance(value, dict):
        return {name: in_float64(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [in_float64(entry) for entry in value]
    return value
