"""Running of calls in separate processes, so that a crash or a hang ends a batch and not the fuzzer."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._inductor.config

from .check import Outcome, run_call

__all__ = ["Batch", "run_batches", "run_range"]

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


def run_range(name: str, seeds: range, device: str) -> Iterator[tuple[int, Outcome]]:
    """Run the calls in this process, and yield each seed with its outcome."""
    for seed in seeds:
        outcome = _outcome(name, seed, device)
        yield seed, outcome
        if outcome.is_fatal:
            return


def _serve(connection: Connection, stderr_path: str, name: str, seeds: Sequence[int], device: str) -> None:
    """Run in the process of a batch. Report each seed before its call, and its outcome afterwards."""
    file = os.open(stderr_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    for seed in seeds:
        connection.send((seed, None))
        outcome = _outcome(name, seed, device)
        connection.send((seed, (outcome.kind, outcome.message)))
        if outcome.is_fatal:
            break
    connection.close()


class Batch:
    """A process that runs the calls of some seeds."""

    def __init__(self, name: str, seeds: Sequence[int], device: str, limit_s: float) -> None:
        self.name, self.seeds, self.device, self.limit_s = name, seeds, device, limit_s
        context = SPAWN if device == "cuda" else FORKSERVER
        with tempfile.NamedTemporaryFile(prefix="visdet_fuzz_", suffix=".txt", delete=False) as file:
            self.stderr_path = file.name
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_serve, args=(theirs, self.stderr_path, name, seeds, device), daemon=True
        )
        sys.stdout.flush()
        self.process.start()
        theirs.close()
        self.current: int | None = None
        self.finished = 0  # calls with an outcome
        self.is_over = self.has_ended_early = False
        self.deadline = time.monotonic() + START_LIMIT_S

    def receive(self) -> tuple[int, Outcome] | None:
        """Return the next seed and outcome, or None if a call has begun, or if the process has ended (``is_over``)."""
        try:
            seed, outcome = self.connection.recv()
        except (EOFError, OSError):
            return self._death()
        self.deadline = time.monotonic() + self.limit_s
        if outcome is None:
            self.current = seed
            return None
        self.current, self.finished = None, self.finished + 1
        self.has_ended_early = Outcome(*outcome).is_fatal
        return seed, Outcome(*outcome)

    def _death(self) -> tuple[int, Outcome] | None:
        self.process.join()
        self.is_over = True
        seed, self.current = self.current, None
        code = self.process.exitcode
        if seed is None and (code == 0 or self.has_ended_early):
            return None
        seed = self.seeds[min(self.finished, len(self.seeds) - 1)] if seed is None else seed
        self.finished += 1
        cause = DEATHS.get(code or 0, f"exit status {code}")
        return seed, Outcome("crash", f"{cause}\n{self._stderr()}")

    def stop_if_late(self) -> tuple[int, Outcome] | None:
        """End the process if its call has taken too long, and return that outcome."""
        if time.monotonic() < self.deadline:
            return None
        os.kill(self.process.pid or 0, signal.SIGABRT)  # faulthandler then writes a traceback.
        self.process.join(10)
        self.process.kill()
        self.process.join()
        self.is_over = True
        seed = self.seeds[min(self.finished, len(self.seeds) - 1)] if self.current is None else self.current
        self.finished, self.current = self.finished + 1, None
        return seed, Outcome("hang", f"no end within {self.limit_s:.0f} s\n{self._stderr()}")

    def _stderr(self) -> str:
        with open(self.stderr_path, errors="replace") as file:
            return file.read()[-6000:].strip()

    @property
    def rest(self) -> Sequence[int]:
        """The seeds without an outcome."""
        return self.seeds[self.finished :]

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        os.unlink(self.stderr_path)


def run_batches(
    name: str, seeds: Sequence[int], device: str, *, jobs: int, batch_size: int, limit_s: float, until: float
) -> Iterator[tuple[int, Outcome]]:
    """Run the calls in batches, and yield each seed with its outcome in any order, until a time or the last seed."""
    pending = [seeds[i : i + batch_size] for i in range(0, min(len(seeds), batch_size * jobs), batch_size)]
    begun = batch_size * jobs
    batches: list[Batch] = []
    try:
        while batches or pending:
            while pending and len(batches) < jobs:
                batches.append(Batch(name, pending.pop(0), device, limit_s))
            ready = wait([batch.connection for batch in batches], timeout=1.0)
            for batch in list(batches):
                result = batch.receive() if batch.connection in ready else batch.stop_if_late()
                if result is not None:
                    yield result
                if not batch.is_over:
                    continue
                batches.remove(batch)
                batch.close()
                rest = batch.rest
                if len(rest) == 0 and begun < len(seeds):
                    rest, begun = seeds[begun : begun + batch_size], begun + batch_size
                if len(rest) and time.monotonic() < until:
                    pending.append(rest)
            if time.monotonic() > until:
                return
    finally:
        for batch in batches:
            batch.close()
