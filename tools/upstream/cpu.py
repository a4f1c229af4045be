"""Answers of the CPU to code that asks for CUDA by itself."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["CpuForCuda", "Nothing"]

_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class CpuForCuda(TorchFunctionMode):
    """While it is active, ``.cuda()`` and ``device="cuda"`` mean the CPU, and every tensor says ``is_cuda``.

    ``asked`` tells whether the code has asked for CUDA.
    """

    asked = False

    @contextmanager
    def available(self) -> Iterator[None]:
        """Let CUDA be available, so that mmdet's focal loss takes mmcv's operator, which allows negative labels."""
        with (
            patch("torch.cuda.is_available", lambda: True),
            patch("torch.cuda.get_device_name", lambda *device: "CPU"),
            patch("torch.cuda.get_rng_state", lambda *device: torch.get_rng_state()),
        ):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients. A function mode does not reach what checkpoints compute again."""
        with (
            patch.object(torch.Tensor, "is_cuda", True),
            patch.object(torch.Tensor, "cuda", lambda tensor, *others, **named: tensor),
        ):
            loss.backward()

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function == torch.Tensor.cuda:
            self.asked = True
            return arguments[0]
        if function == _IS_CUDA:
            return True
        named = dict(named or {})
        if "device" in named:
            named["device"] = self._cpu(named["device"])
        if function in (torch.Tensor.to, torch.device):
            arguments = tuple(map(self._cpu, arguments))
        return function(*arguments, **named)

    def _cpu(self, value: Any) -> Any:
        if isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda":
            self.asked = True
            return "cpu"
        return value


class Nothing(nullcontext):
    """What takes the place of ``CpuForCuda`` on a GPU."""

    asked = False
    available = nullcontext
    backward = staticmethod(torch.Tensor.backward)
