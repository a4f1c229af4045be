"""Whether the kernels of training steps are launched by CUDA graphs, so that calls from Python cost no time."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["are_launches_replayed", "launches_are_replayed"]

_depth = [0]


@contextmanager
def launches_are_replayed() -> Iterator[None]:
    """Let layers within the block choose what takes the GPU less time, even if its calls take the host longer.

    The block holds the eager steps between replayed ones, too, so that all steps of a run have the same rounding. It
    also holds the backward passes, which may compute a layer again.
    """
    _depth[0] += 1
    try:
        yield
    finally:
        _depth[0] -= 1


def are_launches_replayed() -> bool:
    """Return whether the call is within ``launches_are_replayed``."""
    return _depth[0] > 0
