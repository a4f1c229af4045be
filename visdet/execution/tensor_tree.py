"""Functions on trees, which are tensors within nested dicts, lists, tuples and dataclasses."""

from collections.abc import Callable, Hashable
from dataclasses import Field, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

# This is the metadata of a field of a dataclass that the device never reads. Such a field does not belong to the tree.
ON_HOST = {"on_host": True}


def is_on_host(member: Field[Any]) -> bool:
    """Return whether a field has the metadata ``ON_HOST``."""
    return "on_host" in member.metadata


class NotOnDevice:
    """Stands for a field that is ``ON_HOST`` where only the device computes. Whoever reads it gets a RuntimeError."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} of a field that is ON_HOST is read where only the device computes")

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("a field that is ON_HOST is read where only the device computes")

    __len__ = __iter__ = __getitem__ = __bool__ = __eq__ = __float__ = __index__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def map_tensors(
    function: Callable[[Tensor], Tensor], tree: Any, on_host: Callable[[], Any] | None = None
) -> Any:
    """Return the tree with each tensor replaced by the result of ``function`` for it.

    Args:
        function: a function of a tensor. tree: the tree.
        on_host: makes what replaces a field that is ``ON_HOST``, such as ``NotOnDevice``. By default, it stays.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: map_tensors(function, value, on_host) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        kind = type(tree)
        values = [map_tensors(function, value, on_host) for value in tree]
        return kind(*values) if hasattr(tree, "_fields") else kind(values)
    if is_dataclass(tree) and not isinstance(tree, type):
        changed = {}
        for member in fields(tree):
            name = member.name
            if not is_on_host(member):
                changed[name] = map_tensors(function, getattr(tree, name), on_host)
            elif on_host is not None:
                changed[name] = on_host()
        return replace(tree, **changed)
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree. Their order is the same for all trees of one layout."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


def layout_of(tree: Any) -> Hashable:
    """Return the layout of a tree: its names, its constants, and the shapes, types and devices of its tensors."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.dtype, tree.device
    if isinstance(tree, dict):
        return tuple((name, layout_of(value)) for name, value in tree.items())
    kind = type(tree)
    if isinstance(tree, (list, tuple)):
        return (kind, *(layout_of(value) for value in tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [member.name for member in fields(tree) if not is_on_host(member)]
        return (kind, *(layout_of(getattr(tree, name)) for name in names))
    return tree
