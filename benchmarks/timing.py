"""Median and spread of a call: do_bench on a GPU, CUDA-graph replay where launches would hide it, a loop on a CPU."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .case import Call

__all__ = ["Timing", "deterministic", "peak_bytes", "prepare", "time_pass"]

GRAPH_COPIES = 20  # calls in one graph: the launch of the graph spreads over them
CPU_WARMUP = 1
CPU_RUNS = (3, 50)  # at least, at most
CPU_LONG_CALL = 1.5  # seconds; a call beyond this is timed once


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, 20th and 80th percentile."""

    median_us: float
    low_us: float
    high_us: float
    runs: int
    method: str

    @classmethod
    def of(cls, seconds: list[float], method: str) -> "Timing":
        """Summarise single times."""
        low, median, high = (float(x) * 1e6 for x in np.quantile(seconds, [0.2, 0.5, 0.8]))
        return cls(median, low, high, len(seconds), method)


@contextlib.contextmanager
def deterministic(fill: bool = True) -> Iterator[None]:
    """Run under ``torch.use_deterministic_algorithms(True)``; ``fill`` as torch does: NaN in every fresh tensor."""
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
    """Return what is timed for a pass: nothing in it but the pass itself."""
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
    """Time one pass of ``call`` for about ``seconds``, a CPU call of over CPU_LONG_CALL seconds once."""
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


def peak_bytes(call: Call, grad_output: Tensor) -> int:
    """Return the most GPU memory that forward and backward hold at once, beside their arguments."""
    step = prepare(call, "both", grad_output)
    step()  # what a first call keeps, such as compiled kernels' tables, is no part of it
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


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
    """Return the seconds of single calls between events, the L2 cache cleared before each."""
    try:
        from triton.testing import do_bench
    except ImportError:
        return _event_times(function, seconds)
    milliseconds = do_bench(function, warmup=seconds * 200, rep=seconds * 1000, return_mode="all")
    return [t / 1000 for t in milliseconds]


def _event_times(function: Callable[[], Any], seconds: float) -> list[float]:
    """Do what do_bench does, without triton."""
    cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for _ in range(5):
        function()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        cache.zero_()
        function()
    torch.cuda.synchronize()
    runs = max(5, int(seconds * 5 / (time.perf_counter() - begin)))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for start, end in events:
        cache.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in events]


def _captured(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    """Return the replay of a graph of GRAPH_COPIES calls.

    The call is made on the stream of the capture: a backward runs on the stream its forward ran on.
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
