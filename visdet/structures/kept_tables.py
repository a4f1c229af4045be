"""Tables on a device that are made once for a size and kept for the next batch of that size."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["keeps_tables", "tables_read"]

_readers: list[list[Any]] = []


def keeps_tables(max_sizes: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that keeps what a function returned for the last ``max_sizes`` arguments.

    A CUDA graph reads the tables at the addresses they had at its capture, and whatever takes their memory once they
    are dropped. So it holds what the function returned in a block of ``tables_read``.
    """

    def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
        kept = functools.lru_cache(maxsize=max_sizes)(make)

        @functools.wraps(make)
        def tables_of(*arguments: Any) -> Any:
            tables = kept(*arguments)
            for reader in _readers:
                reader.append(tables)
            return tables

        return tables_of

    return decorate


@contextmanager
def tables_read() -> Iterator[list[Any]]:
    """Give a list of the tables that the block asks for; whoever holds it keeps them alive."""
    reader: list[Any] = []
    _readers.append(reader)
    try:
        yield reader
    finally:
        _readers.pop()
