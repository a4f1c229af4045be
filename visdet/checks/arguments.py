"""The check of arguments: their types by the annotations of the function that gets them, their ranges by aliases.

A class that a registry of visdet registers checks the arguments of its constructor, however it is constructed, and
:func:`checked` lets a function do so. An annotation such as ``Positive`` or ``list[Share]`` has the range of a number.
"""

import functools
import inspect
import math
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from visdet.errors import InvalidInputError, InvalidTypeError

__all__ = [
    "Above0",
    "Ascending",
    "AtLeast0",
    "Count",
    "Names",
    "Positive",
    "Range",
    "SameAs",
    "Seed",
    "Share",
    "also_takes",
    "check_constructor",
    "check_texts",
    "checked",
    "checked_value",
    "parameters_of",
    "with_other_names",
]

# Other values, such as objects that a script passes, are not checked.
_SCALARS = (NoneType, bool, int, float, str)
_PLAIN = (*_SCALARS, bytes, list, tuple)
_Function = TypeVar("_Function", bound=Callable)


class Range(NamedTuple):
    """The range of a number, written in its annotation: ``Annotated[float, Range(0, 1)]``."""

    least: float
    most: float = math.inf
    is_open: bool = False  # ``least`` itself is outside.

    def has(self, value: float) -> bool:
        """Return whether a number is in the range."""
        least, most, is_open = self
        return least <= value <= most and not (is_open and value == least)

    def __str__(self) -> str:
        least, most, is_open = self
        if is_open:
            return f"above {least}" + (f" and up to {most}" if most < math.inf else "")
        return f"from {least} to {most}" if most < math.inf else f"of {least} or more"


class Distinct:
    """The limit that no item of a list occurs twice."""

    def has(self, items: Collection) -> bool:
        """Return whether the items are distinct."""
        return len({*items}) == len(items)

    def __str__(self) -> str:
        return "of distinct items"


class Ascending:
    """The limit that the numbers of a list ascend, where equal ones may follow each other."""

    def has(self, numbers: Sequence[float]) -> bool:
        """Return whether the numbers ascend."""
        return sorted(numbers) == list(numbers)

    def __str__(self) -> str:
        return "in ascending order"


Names = Annotated[Sequence[str], Distinct()]
Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
AtLeast0 = Annotated[float, Range(0)]
Above0 = Annotated[float, Range(0, is_open=True)]
Share = Annotated[float, Range(0, 1)]


class _DoesNotFit(Exception):
    """A value does not fit an annotation."""


def checked(function: _Function) -> _Function:
    """Return a function that compares its arguments with their annotations and then calls ``function``.

    Values are compared as far as they are of the types of a config file. A list may stand for a tuple, an int for a
    float, and a whole float such as 32.0 becomes an int where an int is expected. A NaN fits no annotation.

    Raises (when it is called):
        InvalidTypeError: an argument is missing or unknown.
        InvalidInputError: a value does not fit. The message names the class or function, the argument, the annotation
            and the value.
    """
    is_of_object = function.__name__ in ("__init__", "__call__")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        signature = _signature(function)
        parameters = signature.parameters
        name = type(args[0]).__name__ if is_of_object else function.__name__
        try:
            bound = signature.bind(*args, **_own_arguments(name, function, kwargs))
        except TypeError as error:
            known = ", ".join(key for key in parameters if key != "self")
            accepts = f"; it accepts {known}" if "unexpected" in str(error) else ""
            for other, here in getattr(function, "other_names", {}).items():
                if other in kwargs:
                    accepts = f"; write {here}"
            raise InvalidTypeError(f"{name}() {error}{accepts}") from None
        arguments = bound.arguments
        for key, value in arguments.items():
            parameter = parameters[key]
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                arguments[key] = checked_value(f"{name}: {key}", value, parameter.annotation)
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def with_other_names(names: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Let the error for an unknown argument of a :func:`checked` function say what to write.

    Args:
        names: names that people try, and what the argument is called here.
    """

    def named(function: _Function) -> _Function:
        function.other_names = names  # type: ignore[attr-defined]
        return function

    return named


def also_takes(**others: Any) -> Callable[[_Function], _Function]:
    """Let a :func:`checked` function take arguments that other projects have under its name.

    Args:
        others: the only value that is accepted, which is what the function does without it; ``...`` for an argument
            that has no effect here, whatever its value; or ``SameAs(name)`` for one that is called ``name`` here.
    """

    def known(function: _Function) -> _Function:
        function.also_takes = others  # type: ignore[attr-defined]
        return function

    return known


class SameAs(NamedTuple):
    """The name of an argument that has another name elsewhere."""

    name: str


def _own_arguments(name: str, function: Callable, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function itself has."""
    others = getattr(function, "also_takes", {})
    own = dict(given)
    for key, here in others.items():
        if key not in own:
            continue
        value = own.pop(key)
        if isinstance(here, SameAs):
            (same,) = here
            if same in own:
                raise InvalidTypeError(f"{name}() got {key} and {same}, which are the same argument")
            own[same] = value
        elif here is not ... and value != here:
            raise InvalidInputError(
                f"{name}: {key} must be {here!r}, because nothing else is supported, got {value!r:.200}"
            )
    return own


def check_constructor(kind: type) -> None:
    """Let a class of visdet, and its bases in visdet, check the arguments of their constructors."""
    for base in kind.__mro__:
        construct = vars(base).get("__init__")
        if base.__module__.startswith("visdet.") and construct and not hasattr(construct, "__wrapped__"):
            base.__init__ = checked(construct)  # type: ignore[misc]


def checked_value(name: str, value: Any, hint: Any) -> Any:
    """Return a value that fits an annotation, which may be a converted one.

    Raises:
        InvalidInputError: it does not fit. The message begins with ``name``.
    """
    try:
        return _converted(value, hint)
    except _DoesNotFit:
        raise InvalidInputError(f"{name} must be {_text(hint)}, got {value!r:.200}") from None


def check_texts(target: Callable, arguments: Mapping[str, Any]) -> None:
    """Refuse texts in place of numbers among the arguments of a class, which may be of another package.

    Annotations of other packages may be missing or loose, so that nothing else is compared.

    Raises:
        InvalidInputError: there is one. The message names the class and the argument.
    """
    for key, parameter in parameters_of(target).items():
        hint, values = parameter.annotation, arguments.get(key)
        if hint is parameter.empty and isinstance(parameter.default, int | float):
            hint = bool | float
        if any(isinstance(one, str) for one in (values if isinstance(values, list | tuple) else [values])):
            checked_value(f"{target.__name__}: {key}", values, hint)


@functools.cache
def parameters_of(target: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class or a function, including those that it passes on to its base classes."""
    found: dict[str, inspect.Parameter] = {}
    bases = target.__mro__[:-1] if inspect.isclass(target) else ()
    constructors = [base.__init__ for base in bases if base.__init__ is not object.__init__]  # type: ignore[misc]
    for function in constructors or [target]:
        parameters = _signature(function).parameters.values()
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(parameter.name, parameter)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    found.pop("self", None)
    return found


@functools.cache
def _signature(function: Callable) -> inspect.Signature:
    """Return the signature of a function with the annotations themselves in place of their texts."""
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # An annotation is for type checkers alone. Texts of such a function are not checked.
        return inspect.signature(function)


def _converted(value: Any, hint: Any) -> Any:
    """Return a value that fits an annotation, or raise _DoesNotFit."""
    is_of_config = type(value) in _PLAIN or isinstance(value, dict)
    if not is_of_config or hint in (Any, inspect.Parameter.empty):
        return value
    if isinstance(value, float) and math.isnan(value):
        raise _DoesNotFit
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        plain, *limits = inner
        converted = _converted(value, plain)
        return _accept(converted, all(limit.has(converted) for limit in limits))
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
    kind = NoneType if hint is None else origin or hint
    if kind in _SCALARS:
        _accept(value, _is_of(kind, value))
        return int(value) if kind is int and isinstance(value, float) else value
    if not inspect.isclass(kind):
        return value
    if issubclass(kind, Mapping):
        _accept(value, isinstance(value, dict))
        for item in value.values() if inner else ():
            _converted(item, inner[1])
        return value
    if issubclass(kind, Collection) or kind.__module__ in ("collections.abc", "typing"):
        return _converted_items(value, kind, inner)
    # An object, which a config builds from a dict, or a path.
    return _accept(
        value,
        isinstance(value, dict)
        or kind is object
        or (isinstance(value, str) and issubclass(kind, os.PathLike)),
    )


def _is_of(kind: type, value: Any) -> bool:
    """Return whether a value is of a plain type. A whole float is an int, an int is a float, and 0 and 1 are bools."""
    if kind is bool:
        return isinstance(value, bool) or value in (0, 1)
    if isinstance(value, bool):
        return False
    if kind is int and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int | float if kind is float else kind)


def _converted_items(value: Any, kind: type, inner: tuple) -> Any:
    if kind.__name__ == "Callable":
        return _accept(value, isinstance(value, dict))
    if not isinstance(value, (list, tuple)):
        return _accept(value, isinstance(value, dict) and kind.__name__ in ("Collection", "Iterable"))
    count = len(value)
    has_lengths = issubclass(kind, tuple) and inner and inner[-1] is not Ellipsis
    hints = inner if has_lengths else (inner[:1] or (Any,)) * count
    _accept(value, len(hints) == count)
    converted = type(value)(map(_converted, value, hints))
    return value if all(map(operator.is_, converted, value)) else converted


def _accept(value: Any, fits: bool) -> Any:
    if not fits:
        raise _DoesNotFit
    return value


def _text(hint: Any) -> str:
    """Return an annotation as a reader writes it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        plain, *limits = inner
        return " ".join([_text(plain), *map(str, limits)])
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (Union, UnionType):
        return " | ".join(map(_text, inner))
    name = "None" if hint is NoneType else getattr(origin or hint, "__name__", str(hint))
    return (
        f"{name}[{', '.join('...' if one is Ellipsis else _text(one) for one in inner)}]" if inner else name
    )
