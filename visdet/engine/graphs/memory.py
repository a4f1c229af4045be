"""What the CUDA graphs of a model share in memory."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from visdet.execution.capture import Capture, captures


class HasGraphs(Protocol):
    """Something that replays graphs."""

    def forget_graphs(self) -> None:
        """Forget the graphs and their memory."""


_BESIDE = 2  # Each more holds workspaces of cuBLAS.

_living: "WeakSet[Any]" = WeakSet()  # all that has graphs


def note_owner(owner: HasGraphs) -> None:
    """Note something that has graphs, which forgets them after a capture that fails."""
    _living.add(owner)


def why_not_captured(capture: Callable[[], Any]) -> str | None:
    """Run a function that captures graphs, and return why it failed, or None.

    After a failure, all graphs of the process are forgotten. The generator's state regards the capture as unfinished,
    and graphs keep the state with which they were captured, so that they would no longer draw from the generator.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    random_state = generator.clone_state()
    try:
        capture()
        return None
    except RuntimeError as error:  # Something cannot be captured, or the memory does not suffice.
        reason = str(error)  # The error itself holds all that has been computed.
    generator.graphsafe_set_state(random_state)
    for owner in _living:
        owner.forget_graphs()
    return reason


@contextmanager
def host_waits(mode: str) -> Iterator[None]:
    """Run the block such that an operation for which the host waits warns ("warn") or raises an error ("error")."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this is a prototype.
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def counts_in_words(counts: Counter[str], what: str) -> str:
    """Return how many there were in all, and how many of each kind."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    return f"{sum(counts.values())} {what}, {kinds}"


class GraphMemory:
    """What the graphs of all shapes share: a pool, and streams to capture on.

    Graphs run one after another on one stream, so that what one of them left in the pool may be overwritten by the
    next. torch makes no graphs in a pool that all graphs have left.

    Attributes:
        replays: how many replays have begun that overwrite the activations of the ones before.
        half_copies: the 16-bit copies of parameters, which each step makes anew.
        beside: streams for the gradients of parameters.
    """

    def __init__(self) -> None:
        self.replays = 0
        self.half_copies: dict[tuple[nn.Parameter, torch.dtype], Tensor] = {}
        self.pool = torch.cuda.graph_pool_handle()
        streams = (torch.cuda.Stream() for _ in range(2 + _BESIDE))
        self.stream, self.side, *self.beside = streams

    @contextmanager
    def captures(self, keeps_activations: bool = False) -> Iterator[Capture]:
        """Run the block on the streams, after all earlier work and before all later work on the current stream.

        Backward passes in the block run in this thread. The block shares no casts of weights by autocast with other
        work. For ``keeps_activations``, see ``Capture``.
        """
        outer = torch.cuda.current_stream()
        inner = self.stream
        inner.wait_stream(outer)
        torch.clear_autocast_cache()
        try:
            with (
                torch.cuda.stream(inner),
                captures(self.side, keeps_activations) as capture,
                torch.autograd.set_multithreading_enabled(False),
            ):
                yield capture
        finally:
            torch.clear_autocast_cache()
            outer.wait_stream(inner)

    def recording(self, graph: torch.cuda.CUDAGraph) -> Any:
        """Return a context whose work is recorded in a graph instead of being done."""
        return torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local")

    def reserved_bytes(self) -> int:
        """Return the size of the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == self.pool)
