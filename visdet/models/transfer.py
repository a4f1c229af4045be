"""Copies of a few numbers from the host to the device, and back."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from visdet.execution.capture import keeps_tables
from visdet.execution.tensor_tree import map_tensors, tensors_of


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


class SamplesOnHost:
    """The tensors of each sample of a batch, on their way to memory of their own on the host.

    The copies begin at once. Meanwhile the host may arrange the tensors, whose numbers are there after ``wait``.

    Args:
        batch: tensors [B, ...], in nested dicts.

    Attributes:
        samples: the tensors [...] of each sample, in dicts of the same names.
    """

    def __init__(self, batch: Any) -> None:
        tensors = tensors_of(batch)
        self._device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        of_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            of_type.setdefault(tensor.dtype, []).append(tensor)
        arriving: dict[int, Tensor] = {}  # All tensors of a type come by one copy.
        for group in of_type.values():
            copy = torch.cat([tensor.reshape(-1) for tensor in group]).to("cpu", non_blocking=True)
            parts = copy.split([tensor.numel() for tensor in group])
            arriving |= {
                id(tensor): part.view(tensor.shape) for tensor, part in zip(group, parts, strict=True)
            }
        self._sources = [row for tensor in tensors for row in arriving[id(tensor)].unbind()]
        num_samples = len(tensors[0]) if tensors else 0
        self._rows = [torch.empty_like(row) for row in self._sources]
        self.samples = []
        for index in range(num_samples):
            rows = iter(self._rows[index::num_samples])
            self.samples.append(map_tensors(functools.partial(_next_of, rows), batch))

    def wait(self) -> None:
        """Return when the numbers are there."""
        if self._sources:
            if self._device is not None:
                # Memory that is written for the first time is slow, and the host has nothing else to do here.
                for row in self._rows:
                    row.zero_()
                torch.cuda.current_stream(self._device).synchronize()
            torch._foreach_copy_(self._rows, self._sources)
            self._sources = []


def _next_of(tensors: Iterator[Tensor], replaced: Tensor) -> Tensor:
    return next(tensors)


@keeps_tables(max_sizes=64)
def constants_on(device: torch.device, numbers: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return (nested tuples of) numbers on ``device``, where they are copied once."""
    with torch.inference_mode(False), torch.no_grad():
        return to_device(numbers, device, dtype)
