"""Median and spread of the time of a call.

On a GPU, do_bench times the call, or the replay of a CUDA graph if launches would dominate. On a CPU, a loop does.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .case import Call

GRAPH_COPIES = 20  # number of calls in one graph, over which the launch of the graph is spread
CPU_WARMUP = 1
CPU_RUNS = (3, 50)  # the least and the greatest number of runs
CPU_LONG_CALL = 1.5  # seconds; a longer call is timed only once


@dataclass(frozen=True)
class Timing:
    """The median, the 20th and the 80th percentile of the time of one call, in microseconds."""

    median_us: float
    low_us: float
    high_us: float
    runs: int
    method: str

    @classmethod
    def of(cls, seconds: list[float], method: str) -> "Timing":
        """Return the timing of single times in seconds."""
        low, median, high = (float(x) * 1e6 for x in np.quantile(seconds, [0.2, 0.5, 0.8]))
        return cls(median, low, high, len(seconds), method)


@contextlib.contextmanager
def deterministic(fill: bool = True) -> Iterator[None]:
    """Run the block under ``torch.use_deterministic_algorithms(True)``.

    Args:
        fill: whether torch fills every new tensor with NaN, as it does by default.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]


def prepare(call: Call, kind: str, grad_output: Tensor) -> Callable[[], Any]:
    """Return the function that is timed for a pass. It runs only the pass itself."""
    arguments = list(call.arguments)
    if kind == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return call.function(*arguments)

        return forward
    for position in call.differentiable:
        arguments[position] = arguments[position].detach().requires_grad_()
    leaves = [arguments[position] for position in call.differentiable]
    if kind == "both":
        return lambda: torch.autograd.grad(call.function(*arguments), leaves, grad_output)
    output = call.function(*arguments)
    return lambda: torch.autograd.grad(output, leaves, grad_output, retain_graph=True)


def time_pass(call: Call, kind: str, grad_output: Tensor, graph: bool, seconds: float) -> Timing:
    """Time one pass of ``call`` for about ``seconds``. A call on a CPU over CPU_LONG_CALL seconds is timed once."""
    with contextlib.ExitStack() as stack:
        if kind.startswith("backward_deterministic"):
            stack.enter_context(deterministic(fill=not kind.endswith("unfilled")))
        if not grad_output.is_cuda:
            return _time_on_cpu(prepare(call, kind, grad_output), seconds)
        if graph:
            replay = _captured(lambda: prepare(call, kind, grad_output))
            times = [t / GRAPH_COPIES for t in _gpu_times(replay, seconds)]
            return Timing.of(times, "CUDA graph")
        return Timing.of(_gpu_times(prepare(call, kind, grad_output), seconds), "do_bench")


def _time_on_cpu(function: Callable[[], Any], seconds: float) -> Timing:
    times: list[float] = []
    for _ in range(CPU_WARMUP + CPU_RUNS[1]):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
        if times[0] > CPU_LONG_CALL or (len(times) >= CPU_WARMUP + CPU_RUNS[0] and sum(times) > seconds):
            break
    return Timing.of(times[CPU_WARMUP:] or times, "perf_counter")


def _gpu_times(function: Callable[[], Any], seconds: float) -> list[float]:
    """Return the times of single calls in seconds, measured by events. The L2 cache is cleared before each call."""
    from triton.testing import do_bench  # torch for GPUs brings triton

    milliseconds = do_bench(function, warmup=seconds * 200, rep=seconds * 1000, return_mode="all")
    return [t / 1000 for t in milliseconds]


def _captured(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """Return the replay of a graph of GRAPH_COPIES calls.

    The call is made on the stream of the capture, because a backward runs on the stream of its forward.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function = make()
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(GRAPH_COPIES):
            function()
    return graph.replay
