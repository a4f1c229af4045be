"""Checks and conversions of arguments that several operators share."""

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "as_tensor",
    "check_device",
    "check_numbers",
    "check_tensor",
    "check_that",
    "common_constants",
    "computation_dtype",
    "constant",
    "constants",
    "empty_sum",
    "exact",
    "floating",
    "integer_table",
    "is_index",
    "numbers_to",
    "pair",
    "places_in_groups",
    "starts_of",
    "widened",
]


def check_device(operator: str, name: str, tensor: Tensor, of_name: str, of: Tensor) -> None:
    """Raise RuntimeError unless the argument ``name`` is on the device of the argument ``of_name``."""
    if tensor.device != of.device:
        whose = f"{of_name}'" if of_name.endswith("s") else f"{of_name}'s"
        raise RuntimeError(f"{operator}: {name} must be on {whose} device {of.device}, got {tensor.device}")


def check_that(fits: Any, op: str, name: str, expected: str, given: Any, *numbers: Any) -> None:
    """Raise a ValueError unless the argument ``name`` fits.

    Args:
        expected: What the argument must be or do, such as "be [{}, 4]", with a pair of braces for each of ``numbers``.
        given: What the error says it is. Of a tensor, that is its shape.
    """
    if not fits:
        got = list(given.shape) if isinstance(given, Tensor) else given
        raise ValueError(f"{op}: {name} must {expected.format(*numbers)}, got {got}")


def check_tensor(op: str, name: str, tensor: Any) -> None:
    """Raise a TypeError unless the argument ``name`` is a dense tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, got {tensor.layout}")


def check_numbers(op: str, name: str, tensor: Tensor, kind: str) -> None:
    """Raise a ValueError unless the argument ``name`` holds numbers of this kind, a key of ``_TYPES``."""
    if tensor.dtype not in _TYPES[kind]:
        raise ValueError(f"{op}: {name} must {_EXPECTED[kind]}, got {tensor.dtype}")


_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = tuple(getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64))
_TYPES = {
    "floating": _FLOATING,
    "real": (*_FLOATING, *_INTEGERS),
    "integers": _INTEGERS,
    "mask": (*_FLOATING, *_INTEGERS, torch.bool),
}
_EXPECTED = {
    "floating": "be of a floating-point type of 16 bits or more",
    "real": "hold real numbers",
    "integers": "hold integers",
    "mask": "hold real numbers or bool",
}


def as_tensor(values: Any) -> Any:
    """Return a NumPy array of any strides and byte order, also a read-only one, as a tensor, and others as they are."""
    if isinstance(values, Tensor) or not hasattr(values, "astype"):
        return values
    # torch takes arrays of the machine's own byte order without negative strides.
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), order="C"))


def floating(tensor: Tensor) -> Tensor:
    """Return a tensor, and one of integers in float32."""
    return tensor if tensor.is_floating_point() else tensor.float()


def computation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type that sums and coordinates have beside ``tensor``: float64 for float64, otherwise float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def widened(tensor: Tensor, beside: Tensor) -> Tensor:
    """Return a tensor in the type that sums and coordinates have beside another one."""
    return tensor.to(computation_dtype(beside))


def constant(tensor: Tensor, beside: Tensor) -> Tensor:
    """Return the same without gradients."""
    return widened(tensor.detach(), beside)


def constants(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return both without gradients, in the type that sums and coordinates have beside the first."""
    return constant(first, first), constant(second, first)


def common_constants(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return both without gradients, in the wider one of the types that they are computed in."""
    wide = torch.promote_types(computation_dtype(first), computation_dtype(second))
    return first.detach().to(wide), second.detach().to(wide)


def exact(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, without gradients."""
    return tensor.detach().double()


def is_index(index: Tensor, size: Any) -> Tensor:
    """Return whether each number lies in 0..size - 1, where ``size`` is a number or a tensor."""
    return (index >= 0) & (index < size)


def numbers_to(count: Any, beside: Tensor) -> Tensor:
    """Return the whole numbers 0 to ``count`` - 1 on the device of a tensor."""
    return torch.arange(count, device=beside.device)


def empty_sum(*tensors: Tensor) -> Any:
    """Return the sum of no numbers of each tensor: 0, which gives a result without numbers of them a gradient of 0."""
    return sum(tensor[:0].sum() for tensor in tensors)


def starts_of(counts: Tensor) -> Tensor:  # [G] -> [G]
    """Return the first place of each group, where ``counts`` are the sizes of groups that follow one another."""
    return counts.cumsum(0) - counts


def places_in_groups(groups: Tensor, counts: Tensor) -> Tensor:  # [N], [G] -> [N]
    """Return the place of each row within its group, where ``groups`` rise and ``counts`` are the sizes of all."""
    return numbers_to(len(groups), groups) - starts_of(counts)[groups]


def integer_table(
    operator: str, name: str, table: Tensor | Sequence[Any], expected: str, beside: Tensor
) -> Tensor:
    """Return a table of integers as an int64 tensor: a tensor on its device, sequences on the CPU.

    Args:
        beside: the tensor that the table describes. A table without data belongs to such a tensor only.
        expected: what the error says besides "an integer tensor", such as "a sequence of integers".

    Raises:
        TypeError: ``table`` is neither a tensor of integers nor such a sequence.
    """
    numbers: Any = table
    problem: Exception | None = None
    if isinstance(table, Tensor):
        check_tensor(operator, name, table)
    else:
        try:
            numbers = torch.tensor(table, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            problem = error
    # A tensor of no numbers is mostly made from an empty list and has float32.
    if problem or (numbers.numel() > 0 and numbers.dtype not in _INTEGERS):
        got = f"a tensor of {table.dtype}" if isinstance(table, Tensor) else repr(table)
        raise TypeError(f"{operator}: {name} must be an integer tensor or {expected}, got {got}") from problem
    if numbers.is_meta and not beside.is_meta:
        raise RuntimeError(f"{operator}: {name} must be on {beside.device} or the CPU, got {numbers.device}")
    return numbers.to(torch.int64)


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width), given one integer for both or two integers.

    Raises:
        TypeError: ``size`` is something else, such as a number with a fraction.
    """
    numbers: Any = size if isinstance(size, Iterable) and getattr(size, "ndim", True) else (size, size)
    try:
        height, width = numbers
        return index(height), index(width)
    except (TypeError, ValueError) as error:
        raise TypeError(f"a size must be an integer or (height, width) of integers, got {size!r}") from error
