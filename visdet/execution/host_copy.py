"""Copies of numbers from a GPU to the host, for which the GPU does not wait."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def stack_numbers(numbers: Iterable[Tensor | float]) -> Tensor:
    """Return tensors of one element and plain numbers as a float64 vector. It is on a GPU if one of them is."""
    values = [torch.as_tensor(number).detach().reshape(()) for number in numbers]
    device = next((value.device for value in values if value.is_cuda), None)
    if device is not None:
        # A copy from memory that is not pinned would wait for the GPU.
        values = [v if v.is_cuda else v.pin_memory().to(device, non_blocking=True) for v in values]
    return torch.stack(values).double() if values else torch.empty(0)


def _arrival_on(device: torch.device) -> torch.cuda.Event:
    """Return an event for which the host can wait, without a core that is busy meanwhile."""
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True))


class HostCopy:
    """A copy of numbers on the host. The host waits for the GPU only when it reads them.

    Args:
        numbers: the numbers by name. Each is a tensor of one element on any device, or a plain number.
    """

    def __init__(self, numbers: Mapping[str, Tensor | float]) -> None:
        self._names = list(numbers)
        values = stack_numbers(numbers.values())
        self._values = values.to("cpu", non_blocking=True)
        self._arrival = (
            torch.cuda.current_stream(values.device).record_event(torch.cuda.Event(blocking=True))
            if values.is_cuda
            else None
        )

    @property
    def is_there(self) -> bool:
        """Whether the numbers were on the host from the start."""
        return self._arrival is None

    def read(self) -> dict[str, float]:
        """Return the numbers by name. This waits until the GPU has computed them."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return dict(zip(self._names, self._values.tolist(), strict=True))


class ArrivingSamples:
    """Copies of samples on the host. The host waits for the GPU only when it reads them.

    Args:
        samples: samples whose ``to`` copies their tensors, or anything else, which stays as it is.
    """

    def __init__(self, samples: Sequence[Any]) -> None:
        on_gpu = torch.cuda.is_initialized()
        self._samples = [
            sample.to("cpu", non_blocking=on_gpu) if hasattr(sample, "to") else sample for sample in samples
        ]
        self._arrival = (
            torch.cuda.current_stream().record_event(torch.cuda.Event(blocking=True)) if on_gpu else None
        )

    def read(self) -> list[Any]:
        """Return the samples. This waits until the GPU has computed them."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._samples
