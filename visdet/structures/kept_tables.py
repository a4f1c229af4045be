"""Tables on a device that are computed once for a size and kept for later batches of that size."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["keeps_tables", "tables_read"]

_readers: list[list[Any]] = []
_MODES = torch._C._TorchDispatchModeKey
_STAND_INS = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)  # modes whose tensors have no numbers


def keeps_tables(max_sizes: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that keeps the results of a function for its ``max_sizes`` most recent arguments.

    A CUDA graph reads the tables at the addresses that they had at its capture. Their memory must not be reused while
    the graph exists, so the graph holds the tables that ``tables_read`` has collected. What is made while torch traces
    or transforms a call is not kept, because it may be a stand-in without numbers.
    """

    def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
        kept = functools.lru_cache(maxsize=max_sizes)(make)

        @functools.wraps(make)
        def tables_of(*arguments: Any) -> Any:
            tables = make(*arguments) if _is_transformed() else kept(*arguments)
            for reader in _readers:
                reader.append(tables)
            return tables

        return tables_of

    return decorate


def _is_transformed() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or any(torch._C._get_dispatch_mode(kind) is not None for kind in _STAND_INS)
    )


@contextmanager
def tables_read() -> Iterator[list[Any]]:
    """Yield a list that collects the tables used in the block. Holding the list keeps them alive."""
    reader: list[Any] = []
    _readers.append(reader)
    try:
        yield reader
    finally:
        _readers.pop()
