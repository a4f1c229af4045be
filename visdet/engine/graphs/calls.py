"""Work of an iteration beside the model's, replayed as a CUDA graph."""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, ClassVar

import torch

from .memory import GraphMemory, counts_in_words, host_waits, note_owner, why_not_captured

_SYNCHRONIZES = "called a synchronizing CUDA operation"


class GraphedCall:
    """Work that is the same in most iterations, and a graph then.

    It is captured when it depends on the same as the time before, and runs eagerly otherwise. If it cannot be a graph,
    it runs as without graphs, and ``say`` tells why.

    Args:
        say: a function that is called with a text if the work runs eagerly.
    """

    name: ClassVar[str]  # of the work
    what: ClassVar[str]  # the work, for messages

    def __init__(self, say: Callable[[str], Any] = print) -> None:
        self._say = say
        self._told = ""  # why a call ran eagerly
        self._has_failed = False
        self._graph: Any = None
        self._key: Hashable = None  # what the graph depends on, or what the last eager call depended on
        self._memory: GraphMemory | None = None
        self.counts: Counter[str] = Counter()
        note_owner(self)

    def report(self) -> str:
        """Return how many calls were replayed."""
        name = self.name
        return f"graph of {name}: {counts_in_words(self.counts, f'{name}s')}"

    def forget_graphs(self) -> None:
        """Forget the graph and its memory."""
        self._graph = self._key = self._memory = None

    def _run(self, key_of: Callable[[], Hashable], work: Callable[[], Any]) -> None:
        """Do the work, by the graph if there is one.

        Args:
            key_of: a function that returns all that the work depends on besides numbers on the device.
            work: the function that does the work.
        """
        key = key_of()
        if key != self._key:
            self._graph = None
        elif self._graph is None and not self._has_failed:
            reason = why_not_captured(partial(self._record, work))
            if reason is not None:
                self._fail(reason)
        graph = self._graph
        if graph is None:
            self._work_eagerly(work)
            self._key = key_of()
        else:
            self.counts["replayed"] += 1
            graph.replay()

    def _run_without_graph(self, reason: str, work: Callable[[], Any]) -> None:
        """Do work that cannot be a graph, and tell why."""
        self.tell(reason)
        self.counts["eager"] += 1
        work()

    def _work_eagerly(self, work: Callable[[], Any]) -> None:
        """Do the work by the same operations as the graph, and see whether the host waits for one."""
        self.counts["eager"] += 1
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with host_waits("warn"):
                work()
        if not self._has_failed and any(_SYNCHRONIZES in str(warning.message) for warning in found):
            self._fail("it waits for the device")

    def _record(self, work: Callable[[], Any]) -> None:
        """Keep the graph of the work."""
        self._memory = memory = self._memory or GraphMemory()
        graph = torch.cuda.CUDAGraph()
        with memory.captures(), memory.recording(graph):
            work()
        self._graph = graph

    def _fail(self, reason: str) -> None:
        self._has_failed = True
        self.tell(reason)

    def tell(self, reason: str) -> None:
        """Say why the work runs eagerly, unless that was the last reason, too."""
        if reason != self._told:
            self._told = reason
            self._say(f"graph: {self.what} runs eagerly, because {reason}")
