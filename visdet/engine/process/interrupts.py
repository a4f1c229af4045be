"""Signals that end a tool in an orderly way."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal that asks the program to end, as Ctrl-C does.

    Attributes:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__("interrupted" if number == signal.SIGINT else f"ended by {name}")
        self.number = number


@contextmanager
def signals_interrupt() -> Iterator[list[int]]:
    """Raise :class:`Interrupted` in the block at SIGINT, SIGTERM and SIGHUP, and yield a list of those that came.

    Signals within five seconds after one are taken for its repetitions, since torchrun, a terminal and a service
    manager send several. After the block, a further signal ends a program that was interrupted without a word. A signal
    that is ignored stays so, as ``nohup`` wants it. Threads other than the main one cannot be interrupted.
    """
    received: list[int] = []
    last = -math.inf

    def interrupt(number: int, frame: Any) -> None:
        nonlocal last
        received.append(number)
        if time.monotonic() - last > 5:
            last = time.monotonic()
            raise Interrupted(number)

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _SIGNALS} if is_main else {}
    before = {n: old for n, old in before.items() if old in (signal.SIG_DFL, signal.default_int_handler)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if received else old)
