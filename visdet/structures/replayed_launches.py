"""Whether the kernels of training steps are launched by CUDA graphs, so that calls from Python cost no time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["are_launches_replayed", "launches_are_replayed"]

_conditions: list[Callable[[], bool]] = []


@contextmanager
def launches_are_replayed(condition: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Let layers within the block choose what takes the GPU less time, even if its calls take the host longer.

    The block holds the eager steps between replayed ones, too, so that all steps of a run have the same rounding. It
    also holds the backward passes, which may compute a layer again.

    Args:
        condition: a function that tells whether launches are still replayed.
    """
    _conditions.append(condition)
    try:
        yield
    finally:
        _conditions.pop()


def are_launches_replayed() -> bool:
    """Return whether the call is within ``launches_are_replayed``."""
    return bool(_conditions) and _conditions[-1]()
