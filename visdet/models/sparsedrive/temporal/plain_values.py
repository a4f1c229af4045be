"""Conversion of temporal states to and from plain types, which a checkpoint can hold."""

from dataclasses import fields
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from visdet.errors import InvalidInputError
from visdet.execution.tensor_tree import is_on_host

_KIND = "kind"
_VALUES: dict[str, type] = {}


def temporal_value(cls: type) -> type:
    """Register a dataclass as part of a temporal state, so that ``from_plain_values`` can make it again."""
    _VALUES[cls.__name__] = cls
    return cls


def to_plain_values(state: Any) -> Any:
    """Return a state as dicts, lists and tuples of CPU tensors, numbers, strings and None.

    Raises:
        TypeError: the state holds another type, such as a dataclass that is not a ``temporal_value``.
    """
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, (int, float, str, NoneType)):
        return state
    if isinstance(state, dict):
        return {key: to_plain_values(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(to_plain_values(value) for value in state)
    kind = type(state).__name__
    if kind in _VALUES:
        return {_KIND: kind, **to_plain_values(vars(state))}
    raise TypeError(f"to_plain_values: a temporal state must not hold a {kind}")


def from_plain_values(plain: Any, device: torch.device | str) -> Any:
    """Return the state that ``to_plain_values`` was given, with its tensors on ``device``.

    Tensors of fields that are marked as ``ON_HOST`` stay on the CPU. Fields that this version does not have are left
    out.

    Raises:
        ValueError: the state holds a kind of value that this version does not know.
    """
    if isinstance(plain, Tensor):
        return plain.to(device)
    if isinstance(plain, (list, tuple)):
        return type(plain)(from_plain_values(value, device) for value in plain)
    if not isinstance(plain, dict):
        return plain
    if _KIND not in plain:
        return {key: from_plain_values(value, device) for key, value in plain.items()}
    name = plain[_KIND]
    if name not in _VALUES:
        raise InvalidInputError(f"from_plain_values: a temporal state holds an unknown {name!r}")
    kind = _VALUES[name]
    given = {}
    for member in fields(kind):
        key = member.name
        if key in plain:
            given[key] = from_plain_values(plain[key], "cpu" if is_on_host(member) else device)
    return kind(**given)
