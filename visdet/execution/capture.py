"""What a CUDA graph needs of the code of a model while it is captured: a second stream, and tables that stay alive."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .tensor_tree import map_tensors, tensors_of

A = TypeVar("A")
B = TypeVar("B")

_MODES = torch._C._TorchDispatchModeKey
_STAND_INS = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)  # modes whose tensors have no numbers


@dataclass
class Capture:
    """A capture, or a trial run before it.

    Attributes:
        side: a stream beside the current one, for ``in_parallel``.
        keeps_activations: whether the memory suffices to keep what would otherwise be computed again in the backward
            pass.
        tables: the results of functions with ``keeps_tables`` that were used. A graph reads them at the addresses that
            they had at its capture, so that it must hold this list.
    """

    side: torch.cuda.Stream
    keeps_activations: bool = False
    tables: list[Any] = field(default_factory=list)


_current: ContextVar[Capture | None] = ContextVar("visdet_capture", default=None)  # Each thread has its own.


@contextmanager
def captures(side: torch.cuda.Stream, keeps_activations: bool = False) -> Iterator[Capture]:
    """Run the block as a capture of a graph, which may have branches on a second stream. The engine alone does this."""
    capture = Capture(side, keeps_activations)
    token = _current.set(capture)
    try:
        yield capture
    finally:
        _current.reset(token)


def in_parallel(first: Callable[..., A], second: Callable[..., B], reads: Sequence[Any] = ()) -> tuple[A, B]:
    """Return the results of two functions that do not read each other's results.

    In a graph, the second one and its backward pass become a branch, so that the small kernels of both fill the GPU
    together. Eager work gains nothing by a second stream, because the host cannot launch such kernels fast enough for
    one. Random numbers are drawn in the same order everywhere.

    Args:
        first, second: the functions.
        reads: their arguments, trees of tensors. All tensors belong to them that have gradients or that do not live
            longer than both backward passes.
    """

    # The gradients of the second function are added up on its stream, and reach the other one as a last step, since
    # these nodes are older than those of both functions. Otherwise each of them would hold up the first one's backward.
    def seen_by_second() -> Any:
        if not torch.is_grad_enabled():
            return reads
        return map_tensors(lambda tensor: tensor.view_as(tensor) if tensor.requires_grad else tensor, reads)

    capture = _current.get()
    if capture is None:
        seen = seen_by_second()  # Sums in another order would be rounded in another way.
        return first(*reads), second(*seen)
    main = torch.cuda.current_stream()
    side = capture.side
    side.wait_stream(main)
    on_side = torch.cuda.stream(side)
    with on_side:
        seen = seen_by_second()
    result = first(*reads)
    with on_side:
        side_result = second(*seen)
    main.wait_stream(side)
    # The memory of a tensor goes back to the stream that it was made on. The other stream may not have read it by then.
    for tree, stream in ((reads, side), (side_result, main)):
        for tensor in tensors_of(tree):
            if tensor.is_cuda:
                tensor.record_stream(stream)
    return result, side_result


def keeps_activations() -> bool:
    """Return whether a capture, or a trial run before it, keeps what would otherwise be computed again."""
    capture = _current.get()
    return capture is not None and capture.keeps_activations


def recomputed(layer: nn.Module, input: Tensor, *others: Any) -> Any:
    """Return ``layer(input, *others)``, which keeps only its arguments for the backward pass and is run again there.

    In the capture of a graph, a layer keeps everything if the memory suffices, and also if it drops anything: The
    backward pass is another graph, in which it would draw other numbers.
    """
    if keeps_activations():
        return layer(input, *others)
    is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if is_capturing:
        rates = [
            getattr(part, name, 0) for part in layer.modules() if part.training for name in ("p", "drop_prob")
        ]
        if any(isinstance(rate, int | float) and rate > 0 for rate in rates):
            return layer(input, *others)

    # The backward pass runs without the modes of torch functions that are on here, so that it would compute in another
    # way.
    def without_modes(*inputs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return layer(*inputs)

    compute = layer if _current.get() is None else without_modes
    # The state of a generator cannot be read in a capture, and nothing is drawn.
    return checkpoint(compute, input, *others, use_reentrant=False, preserve_rng_state=not is_capturing)


def keeps_tables(max_sizes: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that keeps the results of a function for its ``max_sizes`` most recent arguments.

    It is for tables on a device that follow from sizes alone. What is made while torch traces or transforms a call is
    not kept, because it may be a stand-in without numbers.
    """

    def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
        kept = lru_cache(maxsize=max_sizes)(make)

        @wraps(make)
        def tables_of(*arguments: Any) -> Any:
            if (
                torch.compiler.is_compiling()
                or torch._C._are_functorch_transforms_active()
                or any(torch._C._get_dispatch_mode(kind) is not None for kind in _STAND_INS)
            ):
                return make(*arguments)
            tables = kept(*arguments)
            if (capture := _current.get()) is not None:
                capture.tables.append(tables)
            return tables

        return tables_of

    return decorate
