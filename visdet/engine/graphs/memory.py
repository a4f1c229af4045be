"""What the CUDA graphs of a model share in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from visdet.execution.capture import Capture, captures


class GraphMemory:
    """What the graphs of all shapes share: a pool, two streams to capture on, and gradients.

    Graphs run one after another on one stream, so that what one of them left in the pool may be overwritten by the
    next. Gradients are copied out of it.

    Attributes:
        replays: how many replays have begun that overwrite the activations of the ones before.
    """

    def __init__(self) -> None:
        self.replays = 0
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.side = torch.cuda.Stream()
        self.gradients: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def captures(self) -> Iterator[Capture]:
        """Run the block on the streams, after all earlier work and before all later work on the current stream.

        Backward passes in the block run in this thread.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with (
                torch.cuda.stream(self.stream),
                captures(self.side) as capture,
                torch.autograd.set_multithreading_enabled(False),
            ):
                yield capture
        finally:
            torch.cuda.current_stream().wait_stream(self.stream)

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor to which graphs write the gradient of a parameter."""
        if parameter not in self.gradients:
            self.gradients[parameter] = torch.empty_like(parameter)
        return self.gradients[parameter]

    def reserved_bytes(self) -> int:
        """Return the size of the pool and the gradients."""
        segments = torch.cuda.memory_snapshot()
        pool = sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == self.pool)
        return pool + sum(held.nbytes for held in self.gradients.values())
