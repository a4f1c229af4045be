"""16-bit copies of all weights that autocast would cast one at a time."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["WeightCasts"]

# The functions of torch that autocast runs in 16 bits and our models call with weights.
_RUN_IN_16_BITS = frozenset({F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, torch.addmm})


class WeightCasts(TorchFunctionMode):
    """A mode in which functions under autocast get weights that were cast before.

    Autocast launches a kernel for each weight that it casts, and autograd another one for the gradient. In this mode,
    ``F.linear``, convolutions, ``torch.addmm``, and ``Tensor.to`` with the dtype of autocast take a 16-bit copy of each
    weight instead. The copies are leaves of the autograd graph, so that gradients are those of the copies. ``write``
    casts all weights at once. The values are those of autocast, whose cache also has one copy of a weight for all
    calls, so that the gradients of the calls are summed in 16 bits. (Gradients of several calls of ``Tensor.to``, which
    has no cache, would be summed in float32.)

    The mode costs microseconds for each call of a function of torch. It is made for the capture of CUDA graphs, whose
    replays do without it.

    Args:
        weights: the float32 weights. Other tensors are left to autocast.
        device_type: the type of device whose autocast counts.
        memory_of: a function that returns the memory of a weight's copy: an uninitialised tensor of the given dtype
            with the weight's shape and strides.

    Attributes:
        copies: the 16-bit copy of each weight that a function has needed so far.
    """

    def __init__(
        self, weights: Iterable[Tensor], device_type: str, memory_of: Callable[[Tensor, torch.dtype], Tensor]
    ) -> None:
        super().__init__()
        self.copies: dict[Tensor, Tensor] = {}
        self._weights = {weight for weight in weights if weight.dtype == torch.float32}
        self._device_type = device_type
        self._memory_of = memory_of
        self._dtype = torch.get_autocast_dtype(device_type)

    def write(self) -> None:
        """Write the current values of the weights to all copies."""
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_(list(self.copies.values()), list(self.copies))

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_autocast():
            if function in _RUN_IN_16_BITS:
                args = tuple(self._cast(argument) for argument in args)
                kwargs = {name: self._cast(argument) for name, argument in kwargs.items()}
            elif function is Tensor.to and args[1:] == (self._dtype,) and not kwargs:
                return self._cast(args[0]).to(self._dtype)
        return function(*args, **kwargs)

    def _is_autocast(self) -> bool:
        """Return whether autocast is on with the dtype of the copies."""
        is_on = torch.is_autocast_enabled(self._device_type)
        return is_on and torch.get_autocast_dtype(self._device_type) == self._dtype

    def _cast(self, argument: Any) -> Any:
        """Return the copy if the argument is a weight, and otherwise the argument."""
        if not isinstance(argument, Tensor) or argument not in self._weights:
            return argument
        if argument not in self.copies:
            copy = self._memory_of(argument, self._dtype).detach()
            self.copies[argument] = copy.copy_(argument.detach()).requires_grad_(argument.requires_grad)
        return self.copies[argument]
