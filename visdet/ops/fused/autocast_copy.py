"""Copies of activations in autocast's type, written by the kernel that computed the activations."""

import torch
from torch import Tensor

__all__ = ["give_copy", "in_autocast_type"]


def give_copy(tensor: Tensor, copy: Tensor) -> None:
    """Note a copy of a tensor in another type, which has a gradient of its own. A detached tensor has no copy."""
    tensor.autocast_copy = copy, tensor._version  # type: ignore[attr-defined]


def in_autocast_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the copy of a tensor in this type if there is one, and the tensor if not or if it has changed since."""
    copy, version = getattr(tensor, "autocast_copy", (None, 0))
    return tensor if copy is None or copy.dtype != dtype or version != tensor._version else copy
