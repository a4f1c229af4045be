"""Modules that call an operator with settings."""

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["OperatorModule"]


class OperatorModule(nn.Module):
    """A module that calls ``operator`` with its settings, which are attributes with the names of the arguments."""

    operator: Callable[..., Any]

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings = tuple(settings)
        for name, value in settings.items():
            setattr(self, name, value)

    def _call(self, *tensors: Any, **named: Any) -> Any:
        return self.operator(*tensors, **named, **{name: getattr(self, name) for name in self._settings})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self._settings)
