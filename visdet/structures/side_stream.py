"""A second stream of a GPU, for parts of a model that do not read each other's results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .tensor_tree import tensors_of

__all__ = ["in_parallel", "side_stream"]

A = TypeVar("A")
B = TypeVar("B")

_streams: list[torch.cuda.Stream] = []


@contextmanager
def side_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let ``in_parallel`` use a stream beside the current one within the block.

    A CUDA graph that is captured in the block then has branches, whose small kernels fill the GPU together. Eager work
    gains nothing, because the host cannot launch such kernels fast enough for one stream.
    """
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.pop()


def in_parallel(first: Callable[[], A], second: Callable[[], B], reads: Any = ()) -> tuple[A, B]:
    """Return the results of two functions that do not read each other's results.

    Within ``side_stream``, the second one and its backward pass run on that stream. Random numbers are drawn in the
    same order everywhere.

    Args:
        first, second: the functions.
        reads: the tensors, in lists, dicts or data classes, that the second function reads and that do not live longer
            than both backward passes.
    """
    if not _streams:
        return first(), second()
    main, side = torch.cuda.current_stream(), _streams[-1]
    side.wait_stream(main)
    result = first()
    with torch.cuda.stream(side):
        side_result = second()
    main.wait_stream(side)
    # The memory of a tensor goes back to the stream that it was made on. The other stream may not have read it by then.
    for tree, stream in ((reads, side), (side_result, main)):
        for tensor in tensors_of(tree):
            if tensor.is_cuda:
                tensor.record_stream(stream)
    return result, side_result
