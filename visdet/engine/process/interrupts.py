"""Signals that end a tool in an orderly way."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# The last one is what SLURM sends before it ends or requeues a job (`--signal=USR1@120`).
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Interrupted(KeyboardInterrupt):
    """A signal that asks the program to end, as Ctrl-C does.

    Attributes:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__("interrupted" if number == signal.SIGINT else f"ended by {name}")
        self.number = number


@dataclass
class NotedSignal:
    """A signal that has come in a block of :func:`signals_noted`.

    Attributes:
        number: the number of the signal, or 0.
        at_once: whether a signal interrupts the block instead, as it does elsewhere.
    """

    number: int = 0
    at_once: bool = False


_noting: list[NotedSignal] = []


@contextmanager
def signals_interrupt(ends: bool = True) -> Iterator[list[int]]:
    """Raise :class:`Interrupted` in the block at SIGINT, SIGTERM, SIGHUP and SIGUSR1, and yield a list of those.

    Signals within five seconds after one are taken for its repetitions, since torchrun, a terminal and a service
    manager send several. After the block, a further signal ends a program that was interrupted without a word if
    ``ends`` is True. A signal that is ignored stays so, as ``nohup`` wants it. Threads other than the main one cannot
    be interrupted.
    """
    received: list[int] = []
    pause_ends = 0.0

    def interrupt(number: int, frame: Any) -> None:
        nonlocal pause_ends
        received.append(number)
        now = time.monotonic()
        if now >= pause_ends:
            pause_ends = now + 5
            noted = _noting[-1] if _noting else None
            if noted and not (noted.at_once or noted.number):
                noted.number = number
            else:
                raise Interrupted(number)

    is_main = threading.current_thread() is threading.main_thread()
    default = signal.SIG_DFL
    set_handler = signal.signal
    before = {}
    for number in _SIGNALS if is_main else ():
        old = signal.getsignal(number)
        if old in (default, signal.default_int_handler):
            before[number] = old
            set_handler(number, interrupt)
    try:
        yield received
    finally:
        for number, old in before.items():
            set_handler(number, default if received and ends else old)


@contextmanager
def signals_noted() -> Iterator[NotedSignal]:
    """Let the block end by itself at a signal, which is noted. Another one after five seconds interrupts it."""
    noted = NotedSignal()
    _noting.append(noted)
    try:
        with signals_interrupt(ends=False):
            yield noted
    finally:
        _noting.pop()
