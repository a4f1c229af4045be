"""Operators whose arguments are checked and converted by what is declared of them, and within which autocast is off."""

import ast
import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._arguments import as_tensor, check_device, check_numbers, check_tensor, is_index

__all__ = ["DECLARATIONS", "check_indices", "declared"]

DECLARATIONS: dict[str, dict[str, str]] = {}  # what is declared of the arguments of each operator

_Function = TypeVar("_Function", bound=Callable[..., Any])
_TENSOR = re.compile(r"(None or |array or )?(floating|real|integers|mask|any)(?: \[(.+?)\](.*))?")
_PLAIN = (int, float, torch.SymInt, torch.SymFloat)  # torch.compile cannot ask a symbol what it has
_INTEGER: Any = (Integral, torch.SymInt)
_REAL: Any = (Real, torch.SymInt, torch.SymFloat)
_NUMBER = re.compile(
    r"(?:(?:(1 or )?(\d+|(?:\d+ \* )?[A-Z]) (?=\w+s\b))|(?!\w+s\b))(integer|number)s?"
    r"(?:, (at least|above) ([^\s,]+))?(?:, at most (\S+))?"
)


def declared(
    name: str = "", keeps_autocast: bool = False, **arguments: str
) -> Callable[[_Function], _Function]:
    """Return a decorator of an operator that checks its arguments, in the order in which they are declared.

    A tensor is declared by what it holds, "floating", "real" (those and integers), "integers", "mask" (real or bool)
    or "any", and its layout, such as "floating [B, 4 * C, H, W]". A letter is the same size wherever it stands, and a
    first "..." any number of the same sizes. All tensors are on the device of the first one. "None or" and "array or"
    before it allow None and NumPy arrays. A number is "integer" or "number", with the least one and the greatest one:
    "integer, at least 1, at most 9" or "number, above 0". Sequences have their length before it: "2 * D numbers", and
    "1 or 2 integers" may be one number, too. A choice is "one of 'avg', 'max'".

    The operator is given tensors instead of arrays, and Python's numbers instead of those of NumPy and of tensors. If
    the first tensor was an array, the results become arrays.

    Autocast is off within the operator, which computes coordinates and weights in float32 at least, and returns the
    type of the values. Errors within it, of other operators and of torch, begin with its name, except
    ``torch.OutOfMemoryError``.

    Args:
        name: The name in errors. The default is the function's.
        keeps_autocast: Whether autocast stays on, for a function of torch's that has a rule of its own.
    """
    checks = [(argument, *_parsed(text)) for argument, text in arguments.items()]

    def decorate(function: _Function) -> _Function:
        op, names = name or function.__name__, tuple(inspect.signature(function).parameters)
        DECLARATIONS[op] = arguments

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | options
            sizes: dict[str, Any] = {"": 1}  # by letter; a number is a factor of 1
            first: tuple[str, Any] | None = None
            device = "meta"
            are_arrays = False
            try:
                if len(given) < len(args) + len(options):
                    return function(*args, **options)  # Python says which argument is one too many.
                for argument, check, *expected in checks:
                    if argument not in given:
                        continue
                    value = given[argument]
                    taken = given[argument] = check(op, argument, value, sizes, *expected)
                    if not isinstance(taken, Tensor):
                        continue
                    if first is None:
                        first = argument, taken
                        device = taken.device.type
                        are_arrays = taken is not value
                    elif taken is value:
                        check_device(op, argument, taken, *first)
                if keeps_autocast or device == "meta" or not torch.is_autocast_enabled(device):
                    results = function(**given)
                else:
                    with torch.autocast(device, enabled=False):
                        results = function(**given)
                return type(results)(one.numpy() for one in results) if are_arrays else results
            except (
                RuntimeError,
                ValueError,
                TypeError,
                ArithmeticError,
                AssertionError,
                IndexError,
            ) as error:
                called, _, problem = str(error).partition(": ")
                if called != op and not isinstance(error, torch.OutOfMemoryError):
                    error.args = (f"{op}: {problem if called.isidentifier() else error}",)
                raise

        return call  # type: ignore[return-value]

    return decorate


def _parsed(text: str) -> tuple[Any, ...]:
    """Return the function that checks what is so declared, and its last arguments."""
    if text.startswith("one of "):
        return _check_choice, text, ast.literal_eval(text.removeprefix("one of "))
    number = _NUMBER.fullmatch(text)
    if number:
        may_be_one, count, kind, comparison, least, most = number.groups()
        length = None if count is None else _size(count)
        bounds = float(least or "-inf"), float(most or "inf")
        return _check_number, bool(may_be_one), length, kind, comparison, *bounds
    tensor = _TENSOR.fullmatch(text)
    assert tensor, text
    otherwise, kind, layout, note = tensor.groups()
    sizes = None if layout is None else tuple(map(_size, layout.split(", ")))
    return _check_tensor, otherwise, kind, sizes, note or ""


def _size(text: str) -> tuple[int, str, str]:
    """Return the factor and the letter of a size such as "4 * C", and itself."""
    if text.isdigit():
        return int(text), "", text
    factor, _, letter = text.rpartition(" * ")
    return int(factor or 1), letter, text


def _check_tensor(
    op: str,
    name: str,
    given: Any,
    sizes: dict[str, Any],
    otherwise: str | None,
    kind: str,
    layout: tuple[tuple[int, str, str], ...] | None,
    note: str,
) -> Tensor | None:
    """Return the tensor. Raise an error unless it is as declared."""
    if otherwise == "None or " and given is None:
        return None
    tensor = as_tensor(given) if otherwise == "array or " else given
    check_tensor(op, name, tensor)
    if layout is not None:
        known = dict(sizes)
        if not _fits(tensor.shape, layout, sizes):
            expected = ", ".join(
                str(factor * known[letter]).strip("[]") if letter in known else text
                for factor, letter, text in layout
            ).removeprefix(", ")
            raise ValueError(f"{op}: {name} must be [{expected}]{note}, got {list(tensor.shape)}")
    if kind != "any":
        check_numbers(op, name, tensor, kind)
    return tensor


def _fits(shape: Sequence[int], layout: tuple[tuple[int, str, str], ...], sizes: dict[str, Any]) -> bool:
    """Return whether a shape has this layout with the sizes of letters that are known, and add the others to them."""
    if layout[0][1] == "...":
        begin = max(len(shape) - len(layout) + 1, 0)
        if sizes.setdefault("...", list(shape[:begin])) != list(shape[:begin]):
            return False
        shape, layout = shape[begin:], layout[1:]
    if len(shape) != len(layout):
        return False
    for given, (factor, letter, _) in zip(shape, layout, strict=True):
        if letter not in sizes and (factor == 1 or given % factor == 0):
            sizes[letter] = given if factor == 1 else given // factor
        if given != factor * sizes.get(letter, -1):
            return False
    return True


def _check_number(
    op: str,
    name: str,
    given: Any,
    sizes: dict[str, Any],
    may_be_one: bool,
    length: tuple[int, str, str] | None,
    kind: str,
    comparison: str | None,
    least: float,
    most: float,
) -> Any:
    """Return the number or the numbers. Raise an error unless each is as declared."""
    numbers: Any = given
    if not isinstance(given, _PLAIN) and hasattr(given, "tolist") and not getattr(given, "is_meta", False):
        numbers = given.tolist()
    are_several = isinstance(numbers, (list, tuple))
    if are_several:
        numbers = list(map(_of_python, numbers))
    types, most_digits = (_INTEGER, 31) if kind == "integer" else (_REAL, 63)
    several = numbers if are_several else (numbers,)
    has_types = all(isinstance(number, types) and not isinstance(number, bool) for number in several)
    has_length = may_be_one or length is None
    if are_several:
        has_length = bool(several) and length is not None and _fits((len(several),), (length,), sizes)
    if not (has_types and has_length):
        one = "an integer" if kind == "integer" else "a number"
        if length is None:
            expected = one
        else:
            factor, letter, text = length
            count = str(factor * sizes[letter]) if letter in sizes else text
            expected = f"{one} or " * may_be_one + f"{count} {kind}s"
        raise (ValueError if has_types else TypeError)(f"{op}: {name} must be {expected}, got {given!r}")
    for number in several:
        expected = ""
        if comparison and not (number > least or (number == least and comparison == "at least")):
            expected = f"{comparison} {least:g}"
        elif number > most:
            expected = f"at most {most:g}"
        elif isinstance(number, _INTEGER) and abs(number) >= 1 << most_digits:
            expected = f"below 2^{most_digits}"
        elif number != number or (comparison and abs(number) == math.inf):
            expected = "finite"
        if expected:
            raise ValueError(f"{op}: {name} must be {expected}, got {given!r}")
    return numbers


def _of_python(number: Any) -> Any:
    """Return a number of NumPy's as one of Python's, and anything else as it is."""
    is_of_numpy = isinstance(number, Real) and not isinstance(number, _PLAIN) and hasattr(number, "tolist")
    return number.tolist() if is_of_numpy else number


def _check_choice(
    op: str, name: str, given: Any, sizes: dict[str, Any], text: str, choices: tuple[Any, ...]
) -> Any:
    if not isinstance(given, (str, Real)) or given not in choices:
        raise ValueError(f"{op}: {name} must be {text}, got {given!r}")
    return given


def check_indices(op: str, name: str, indices: Tensor, count: int, of: str) -> None:
    """Raise a RuntimeError unless the indices are those of ``count`` things. On CUDA it is a failed assertion."""
    indices = indices.long()
    are_indices = is_index(indices, count).all()
    torch._assert_async(are_indices, f"{op}: {name} must be indices of {of}, from 0 to their number less 1")
