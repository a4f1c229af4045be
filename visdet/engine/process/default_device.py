"""The defaults of torch, which the user of the Python API may have changed."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

__all__ = ["cpu_by_default", "training_defaults"]


@contextmanager
def cpu_by_default() -> Iterator[None]:
    """Make new tensors on the CPU if nothing else is said, whatever ``torch.set_default_device`` has set.

    Data are read on the CPU, and models are moved to their device as a whole. It also decorates functions.
    """
    changed = torch.get_default_device().type != "cpu"
    with torch.device("cpu") if changed else nullcontext():
        yield


@contextmanager
def training_defaults() -> Iterator[None]:
    """Compute gradients, and make new tensors on the CPU if nothing else is said."""
    with cpu_by_default(), torch.inference_mode(False), torch.enable_grad():
        yield
