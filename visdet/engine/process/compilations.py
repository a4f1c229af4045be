"""What torch.compile does in a run, which would otherwise be silent for minutes."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from .console import say


@contextmanager
def compilations_told(is_compiled: bool) -> Iterator[None]:
    """Say, in the block, that torch compiles, and after each part of the model how many there are and what they took.

    Args:
        is_compiled: whether anything is compiled in the block.
    """
    if not is_compiled:
        yield
        return
    from torch._dynamo.callback import callback_handler

    began = monotonic()
    parts = 0

    def tell(_: Any) -> None:
        nonlocal parts
        parts += 1
        say(f"compile: {parts} part{'s' if parts > 1 else ''} compiled after {monotonic() - began:.0f} s")

    say("compile: torch compiles the training step during the first iterations, which can take minutes")
    callback_handler.register_end_callback(tell)
    try:
        yield
    finally:
        callback_handler.remove_end_callback(tell)
