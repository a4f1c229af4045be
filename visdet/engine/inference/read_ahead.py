"""Reading what comes next in threads while something else is computed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["computed_ahead"]

T = TypeVar("T")
R = TypeVar("R")


def computed_ahead(
    function: Callable[[T], R], values: Iterable[T], ahead: int, threads: int = 4
) -> Iterator[R]:
    """Yield the function of each value in order, computed by threads before it is needed.

    Args:
        function: the function.
        values: the values. One thread at a time takes them, in order.
        ahead: how many results are computed in advance.
        threads: how many of them at once.

    Raises:
        Exception: what ``function`` or ``values`` raises comes at its place in the order.
    """
    end = object()
    remaining = iter(values)
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(threads) as computer:

        def start_next() -> Any:
            value: Any = next(remaining, end)
            return end if value is end else computer.submit(function, value)

        started = deque(reader.submit(start_next) for _ in range(ahead))
        try:
            while (result := started.popleft().result()) is not end:
                started.append(reader.submit(start_next))
                yield result.result()
        finally:
            reader.shutdown(cancel_futures=True)
            computer.shutdown(cancel_futures=True)
