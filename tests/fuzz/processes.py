"""Running of calls in separate processes, so that a crash or a hang ends a batch and not the fuzzer."""

import faulthandler
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._inductor.config

from .check import Outcome, run_call

__all__ = ["run_batch", "run_batches", "run_range"]

# CUDA does not work after a fork. The other processes are forked from a server that has imported torch and has run
# nothing, because a fork of this process would lack the threads that its earlier calls have started.
SPAWN: Any = multiprocessing.get_context("spawn")
FORKSERVER: Any = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload([__name__, f"{__package__}.operators"])
START_LIMIT_S = 180.0  # the time in which a new process must have imported torch and found its device
DEATHS = {-signal.SIGSEGV: "segmentation fault", -signal.SIGABRT: "abort", -signal.SIGFPE: "arithmetic fault"}


def _outcome(name: str, seed: int, device: str) -> Outcome:
    from .operators import OPERATORS

    try:
        return run_call(OPERATORS[name], seed, device)
    except Exception as error:  # The drawing or the reference fails, or the device reports an earlier error.
        kind = "CUDA error" if "CUDA" in str(error) else "fuzzer error"
        return Outcome(
            kind, f"{type(error).__name__}: {error} (in the fuzzer itself, line {_line_of(error)})"
        )


def _line_of(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "unknown"


def run_range(name: str, seeds: Sequence[int], device: str) -> Iterator[tuple[int, Outcome]]:
    """Run the calls in this process, and yield each seed with its outcome."""
    for seed in seeds:
        outcome = _outcome(name, seed, device)
        yield seed, outcome
        if outcome.is_fatal:
            return


def _serve(connection: Connection, stderr_path: str, name: str, seeds: Sequence[int], device: str) -> None:
    """Run in the process of a batch. Report the start, and then the outcome of each call."""
    file = os.open(stderr_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    connection.send(None)
    for _, outcome in run_range(name, seeds, device):
        connection.send((outcome.kind, outcome.message))


def run_batch(name: str, seeds: Sequence[int], device: str, limit_s: float) -> Iterator[tuple[int, Outcome]]:
    """Run the calls in a process of their own, and yield each seed with its outcome, up to a crash or a hang."""
    context = SPAWN if device == "cuda" else FORKSERVER
    connection, theirs = context.Pipe(duplex=False)

    def receive(seconds: float) -> Any:
        return connection.recv() if connection.poll(seconds) else ("hang", f"no end within {limit_s:.0f} s")

    with tempfile.NamedTemporaryFile("r", prefix="visdet_fuzz_", suffix=".txt", errors="replace") as stderr:
        process = context.Process(target=_serve, args=(theirs, stderr.name, name, seeds, device), daemon=True)
        sys.stdout.flush()
        process.start()
        theirs.close()
        try:
            for number, seed in enumerate(seeds):
                try:
                    kind, text = (None if number else receive(START_LIMIT_S)) or receive(limit_s)
                except (EOFError, OSError):
                    process.join()
                    kind = "crash"
                    text = DEATHS.get(process.exitcode or 0, f"exit status {process.exitcode}")
                if kind == "hang":
                    os.kill(process.pid or 0, signal.SIGABRT)  # faulthandler then writes a traceback.
                    process.join(10)
                is_over = kind in ("crash", "hang")
                yield seed, Outcome(kind, f"{text}\n{stderr.read()[-6000:].strip()}" if is_over else text)
                if is_over or Outcome(kind).is_fatal:
                    return
        finally:
            process.kill()
            process.join()
            connection.close()


def run_batches(
    name: str, seeds: Sequence[int], device: str, *, jobs: int, batch_size: int, limit_s: float, until: float
) -> Iterator[tuple[int, Outcome]]:
    """Run the calls in batches, and yield each seed with its outcome in any order, until a time or the last seed."""
    starts = iter(range(0, len(seeds), batch_size))
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    is_left = threading.Event()

    def work() -> None:
        for start in starts:
            rest = seeds[start : start + batch_size]
            while len(rest) and time.monotonic() < until and not is_left.is_set():
                for result in run_batch(name, rest, device, limit_s):
                    outcomes.put(result)
                    rest = rest[1:]
                    if is_left.is_set():
                        break
        outcomes.put(None)

    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    try:
        while jobs:
            result = outcomes.get(timeout=min(max(until - time.monotonic(), 0), 1e6))
            jobs -= result is None
            if result is not None:
                yield result
    except queue.Empty:  # The time is over.
        return
    finally:
        is_left.set()
