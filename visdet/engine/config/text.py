"""Configs as Python code."""

import ast
import keyword
import math
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

_WIDTH = 100
_INDENT = " " * 4
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def config_text(values: Mapping[str, Any]) -> str:
    """Return Python code that sets the names of ``values``, sorted by name. Each dict is sorted, too.

    mmengine's ``Config.pretty_text`` has the same content. It formats the code by yapf, which takes 0.2 to 0.6 s.
    """
    text = "".join(f"{name} = {_code(value, len(name) + 3, '')}\n" for name, value in sorted(values.items()))
    modules = sorted({value.__module__ for _, value in leaves(values) if _is_importable(value)})
    if not modules:
        return text
    # With a ``_base_``, the imports are those of a program, and the values are the objects themselves.
    return "_base_ = []\n" + "".join(f"import {module}\n" for module in modules) + text


def values_without_code(values: Mapping[str, Any]) -> list[str]:
    """Return the paths of the values that no code gives back, such as a lambda. ``config_text`` describes them."""
    return [path for path, value in leaves(values) if _code_of_leaf(value) is None]


def _nodes(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a value, and those in nested dicts, lists and tuples, by their dotted paths, the outer ones first."""
    yield path, value
    items: Iterable[tuple[Any, Any]] = ()
    match value:
        case Mapping():
            items = value.items()
        case list() | tuple():
            items = enumerate(value)
    for key, item in items:
        yield from _nodes(item, f"{path}.{key}" if path else str(key))


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dicts, lists and tuples by their dotted paths."""
    return (node for node in _nodes(value) if not isinstance(node[1], Mapping | list | tuple))


def dicts_in(value: Any) -> Iterator[tuple[str, dict]]:
    """Yield the dicts within a config by their dotted paths, the outer ones first."""
    return (node for node in _nodes(value) if node[0] and isinstance(node[1], dict))


def _code_of_leaf(value: Any) -> str | None:
    """Return the code of a value that is no dict, list or tuple, or None if there is no such code."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else f"float('{float(value)}')"
    if _is_importable(value):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return text


def _is_importable(value: Any) -> bool:
    """Return whether a value is a class or a function that its module has under its name."""
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) or not value.__module__:
        return False
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _code(value: Any, used: int, indent: str) -> str:
    """Return the code of a value, in one line if it fits.

    Args:
        used: the number of characters that stand in its first line already. indent: that of its last line.
    """
    match value:
        case dict():
            are_names = all(map(_is_name, value))
            opening, closing = ("dict(", ")") if are_names else "{}"
            items = sorted(value.items(), key=lambda item: str(item[0]))
            parts = [(f"{key}=" if are_names else f"{key!r}: ", item) for key, item in items]
        case list() | tuple():
            opening, closing = "[]" if isinstance(value, list) else "()"
            parts = [("", item) for item in value]
        case _:
            return _code_of_leaf(value) or repr(_ADDRESS.sub("", repr(value)))
    inner = indent + _INDENT
    codes = [key + _code(item, len(inner) + len(key) + 1, inner) for key, item in parts]
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    line = f"{opening}{', '.join(codes)}{comma}{closing}"
    if "\n" not in line and used + len(line) <= _WIDTH:
        return line
    lines = "".join(f"{inner}{code},\n" for code in codes)
    return f"{opening}\n{lines}{indent}{closing}"


def _is_name(key: Any) -> bool:
    """Return whether the key of a dict may be a keyword of ``dict(...)``."""
    return isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)
