"""The numbers of a training step, which reach the host while the device goes on, in one place for all who read them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.dist import all_reduce, get_world_size
from torch import Tensor

from visdet.execution.host_copy import HostCopy, stack_numbers

_BAD = "a loss of a process is not finite"
_SIGNAL = "the signal of a process"


@dataclass
class StepNumbers:
    """The numbers of an iteration on the host.

    Attributes:
        iteration: the number of the iteration, counted from 1.
        values: the losses and the other numbers for the log by name.
        has_bad_loss: whether a loss of any process is NaN or infinite. All processes have the same answer.
    """

    iteration: int
    values: dict[str, float]
    has_bad_loss: bool


def losses_among(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the losses among the results of a training step, which have "loss" in their names."""
    return {name: value for name, value in values.items() if "loss" in name}


class LateNumbers:
    """Gives the numbers of each iteration to those who listen.

    mmengine's hooks wait for the GPU in every iteration, and the GPU is idle until the next one begins. Here, the
    numbers of an iteration are read when the next one has been launched, and earlier only where :meth:`read` asks for
    them: for a line of the log, before a checkpoint or a validation, and after an error. Numbers that are on the host
    from the start are read at once.

    Attributes:
        signal: the number of the signal that a process received in the iteration before, or 0. It is the same in all
            processes, so that they end together and none waits for another.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._heard = 0
        self._listeners: list[Callable[[StepNumbers], None]] = []
        self._unread: tuple[int, HostCopy] | None = None

    def listen(self, listener: Callable[[StepNumbers], None]) -> None:
        """Let a function have the numbers of each iteration from now on."""
        self._listeners.append(listener)

    def take(
        self, iteration: int, outputs: Mapping[str, Tensor | float], device: torch.device, signal: int = 0
    ) -> None:
        """Begin to copy the numbers of an iteration to the host, and read those of the iteration before.

        Every process of the group must call this.

        Args:
            iteration: the number of the iteration, counted from 1.
            outputs: the results of the step. Each is a tensor of one element or a number.
            device: the device of the process group.
            signal: the number of the signal that this process has received, or 0.
        """
        self.read()
        self.signal = self._heard
        numbers = dict(outputs)
        if get_world_size() > 1:
            is_bad, highest = _agreed(outputs, device, signal)
            numbers |= {_BAD: is_bad, _SIGNAL: highest}
        copy = HostCopy(numbers)
        self._unread = iteration, copy
        if copy.is_there:
            self.read()

    def read(self) -> None:
        """Give the numbers that have not been read yet to those who listen. This may wait for the device."""
        if self._unread is None:
            return
        iteration, copy = self._unread
        self._unread = None
        values = copy.read()
        is_bad = not all(map(math.isfinite, losses_among(values).values()))
        is_bad = bool(values.pop(_BAD, is_bad))
        self._heard = int(values.pop(_SIGNAL, 0))
        for listener in self._listeners:
            listener(StepNumbers(iteration, values, is_bad))


def _agreed(outputs: Mapping[str, Any], device: torch.device, signal: int) -> tuple[Tensor, Tensor]:
    """Return whether a loss of any process is not finite, and the highest signal of all processes, on the device."""
    plain: list[float] = []
    tensors: list[Tensor] = []
    for loss in losses_among(outputs).values():
        (tensors if isinstance(loss, Tensor) else plain).append(loss)
    is_bad_here = not all(map(math.isfinite, plain))
    # They are filled on the device, because a copy from memory that is not pinned would wait for the device.
    flags = torch.full((2,), float(signal), dtype=torch.float64, device=device)
    is_bad, highest = flags
    is_bad.fill_(float(is_bad_here))
    if tensors:
        is_bad += (~stack_numbers(tensors).isfinite()).any()
    all_reduce(flags, "max")
    return is_bad, highest
