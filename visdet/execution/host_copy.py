"""Copies of numbers from a GPU to the host, for which the GPU does not wait."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def stack_numbers(numbers: Iterable[Tensor]) -> Tensor:
    """Return tensors of one element, all on one device, as a float64 vector."""
    values = [number.detach().reshape(()) for number in numbers]
    # Beside a float32, torch would round an integer to one.
    return torch.stack([v if v.is_floating_point() else v.double() for v in values]).double()


def _arrival_on(device: torch.device) -> torch.cuda.Event:
    """Return an event for which the host can wait, without a core that is busy meanwhile."""
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True))


class HostCopy:
    """A copy of numbers on the host. The host waits for the GPU only when it reads them.

    Args:
        numbers: the numbers by name. Each is a tensor of one element on any device, or a plain number.
    """

    def __init__(self, numbers: Mapping[str, Tensor | float]) -> None:
        late = {name: value for name, value in numbers.items() if isinstance(value, Tensor) and value.is_cuda}
        self._late_names = list(late)
        # A number that is on the host already does not pass through the GPU, and keeps its value.
        self._numbers = on_host = dict.fromkeys(numbers, math.nan)
        for name in numbers.keys() - late:
            value = numbers[name]
            on_host[name] = float(value.item() if isinstance(value, Tensor) else value)
        self._arrival = None
        values = list(late.values())
        if values:
            self._values = stack_numbers(values).to("cpu", non_blocking=True)
            self._arrival = _arrival_on(values[0].device)

    @property
    def is_there(self) -> bool:
        """Whether the numbers were on the host from the start."""
        return self._arrival is None

    def read(self) -> dict[str, float]:
        """Return the numbers by name. This waits until the GPU has computed them."""
        arrival = self._arrival
        numbers = self._numbers
        if arrival is not None:
            arrival.synchronize()
            numbers.update(zip(self._late_names, self._values.tolist(), strict=True))
        return numbers


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
        self._arrival = _arrival_on(torch.device("cuda")) if on_gpu else None

    def read(self) -> list[Any]:
        """Return the samples. This waits until the GPU has computed them."""
        arrival = self._arrival
        if arrival is not None:
            arrival.synchronize()
        return self._samples
