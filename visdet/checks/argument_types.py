"""The check of a config's arguments against the annotations of the constructor that gets them."""

import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from visdet.errors import InvalidInputError, InvalidTypeError

# Other values, such as objects that a script passes, are not checked.
_PLAIN = (NoneType, bool, int, float, str, bytes, list, tuple)
# Arguments that count something, and the least number of those that a module cannot be without.
_COUNT = re.compile(r"num_\w+|max_refetch|embed_dims|\w+_channels")
_POSITIVE = re.compile(
    r"num_(classes|heads|groups|levels|points|queries|feats|stages)|embed_dims|\w+_channels"
)


def check_flags(**flags: Any) -> None:
    """Raise an InvalidTypeError for an argument that is neither a bool nor None."""
    for name, value in flags.items():
        if not isinstance(value, bool | None):
            raise InvalidTypeError(f"{name} must be True or False, got {value!r}")


def check_paths(**paths: Any) -> None:
    """Raise an InvalidTypeError or an InvalidInputError for an argument that is neither a path nor None."""
    for name, value in paths.items():
        if not isinstance(value, str | os.PathLike | None):
            raise InvalidTypeError(f"{name} must be a path, got {type(value).__name__}")
        if value is not None and (not str(value) or "\0" in str(value)):
            raise InvalidInputError(f"{name} must be a path, got {value!r}")


def check_seed(owner: str, seed: Any) -> None:
    """Raise an InvalidInputError if a seed is not one that the generators of numpy and torch take."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**32:
        raise InvalidInputError(f"{owner}: seed must be a whole number from 0 to {2**32 - 1}, got {seed!r}")


class _DoesNotFit(Exception):
    """A value does not fit an annotation."""


def converted_arguments(target: Callable, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class or a function of visdet, in which a whole float such as 32.0 may become an int.

    Values are compared with the annotations, as far as they are of the types of a config file. A list may stand for a
    tuple and an int for a float. A NaN fits no annotation. A count such as ``num_heads`` or ``in_channels`` is not
    smaller than its default and 0, or 1. The arguments of other packages are returned as they are.

    Raises:
        InvalidTypeError: an argument is missing or unknown.
        InvalidInputError: a value does not fit. The message names the target, the argument, the annotation and the
            value.
    """
    if not getattr(target, "__module__", "").startswith("visdet."):
        return dict(arguments)
    name = target.__name__
    signature = inspect.signature(target)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise InvalidTypeError(f"{name}() {error}") from error
    hints, converted = _hints(target), dict(arguments)
    for key, value in arguments.items():
        if key in hints:
            try:
                converted[key] = _converted(value, hints[key])
            except _DoesNotFit:
                raise InvalidInputError(
                    f"{name}: {key} must be {_text(hints[key])}, got {value!r:.200}"
                ) from None
            if _COUNT.fullmatch(key):
                _check_count(f"{name}: {key}", converted[key], key, signature.parameters.get(key))
    return converted


def _check_count(what: str, value: Any, key: str, parameter: inspect.Parameter | None) -> None:
    default = None if parameter is None else parameter.default
    least = min(int(bool(_POSITIVE.fullmatch(key))), default if isinstance(default, int) else 1)
    for number in value if isinstance(value, list | tuple) else (value,):
        if isinstance(number, int) and number < least:
            raise InvalidInputError(f"{what} must be at least {least}, got {value!r:.200}")


@cache
def _hints(target: Any) -> dict[str, Any]:
    """Return the annotations of all arguments, including those that ``**kwargs`` passes on to the bases."""
    hints: dict[str, Any] = {}
    bases = reversed(target.__mro__) if inspect.isclass(target) else ()
    functions = [init for kind in bases if (init := vars(kind).get("__init__"))] or [target]
    for function in functions:
        if getattr(function, "__module__", "").startswith("visdet."):
            try:
                # typing.get_type_hints makes everything with the default None optional before Python 3.11.
                hints |= inspect.get_annotations(function, eval_str=True)
            except NameError:  # an annotation that exists for type checkers alone
                continue
    return hints


def _converted(value: Any, hint: Any) -> Any:
    """Return a value that fits an annotation, or raise _DoesNotFit."""
    if not (type(value) in _PLAIN or isinstance(value, dict)) or hint is Any or isinstance(hint, str):
        return value
    if isinstance(value, float) and math.isnan(value):
        raise _DoesNotFit
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        # An option that takes the value as it is comes before one that converts it.
        options = sorted(inner, key=lambda option: option is not type(value))
        for option in options:
            try:
                return _converted(value, option)
            except _DoesNotFit:
                continue
        raise _DoesNotFit
    if origin is Literal:
        return _accept(value, value in inner)
    kind = origin or hint
    if kind is None or kind is NoneType:
        return _accept(value, value is None)
    if kind is bool:
        return _accept(value, isinstance(value, bool) or value in (0, 1))
    if kind is int:
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        _accept(value, is_whole and not isinstance(value, bool))
        return int(value) if isinstance(value, float) else value
    if kind is float:
        return _accept(value, isinstance(value, (int, float)) and not isinstance(value, bool))
    if kind is str:
        return _accept(value, isinstance(value, str))
    if not inspect.isclass(kind):
        return value
    if issubclass(kind, Mapping):
        return _accept(value, isinstance(value, dict))
    if issubclass(kind, Collection) or kind.__module__ in ("collections.abc", "typing"):
        return _converted_items(value, kind, inner)
    # An object: a config builds it from a dict, and some are made from a text or found by it.
    return _accept(value, isinstance(value, (dict, str)) or kind is object)


def _converted_items(value: Any, kind: type, inner: tuple) -> Any:
    if kind.__name__ == "Callable":
        return _accept(value, isinstance(value, (dict, str)))
    if not isinstance(value, (list, tuple)):
        return _accept(value, isinstance(value, dict) and kind.__name__ in ("Collection", "Iterable"))
    if issubclass(kind, tuple) and inner and inner[-1] is not Ellipsis:
        if len(inner) != len(value):
            raise _DoesNotFit
        pairs = list(zip(value, inner, strict=True))
    else:
        pairs = [(item, inner[0] if inner else Any) for item in value]
    converted = type(value)(_converted(item, hint) for item, hint in pairs)
    return value if all(new is old for new, old in zip(converted, value, strict=True)) else converted


def _accept(value: Any, fits: bool) -> Any:
    if not fits:
        raise _DoesNotFit
    return value


def _text(hint: Any) -> str:
    """Return an annotation as a reader writes it."""
    text = hint.__name__ if inspect.isclass(hint) and not get_args(hint) else str(hint)
    for prefix in ("collections.abc.", "typing.", "pathlib."):
        text = text.replace(prefix, "")
    return text
