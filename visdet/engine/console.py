"""The terminal of a run: one shared rich console, and a log handler that writes through it."""

import logging
import os
import sys
from collections.abc import Callable

from mmengine.dist import get_rank, is_distributed
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.markup import escape
from rich.text import Text

__all__ = ["ConsoleHandler", "WorkerStart", "console", "is_main_process", "say"]

console = Console(highlight=False)

# Parts of mmengine's remarks about its own internals, which no user can act on. The last comes once for every parameter
# of a frozen stage.
_NOISE = (
    '"FileClient" will be deprecated',
    '"HardDiskBackend" is the alias',
    "The prefix is not set in metric",
    "is skipped since its requires_grad=False",
)


def is_main_process() -> bool:
    """Return whether this process owns the terminal; known before the process group exists too."""
    return (get_rank() if is_distributed() else int(os.environ.get("RANK", 0))) == 0


def say(text: str, style: str | None = None) -> None:
    """Print one line on the main process, above a live progress bar where there is one; never wrapped."""
    if is_main_process():
        # As a Text: a style given to print() would colour the bar below too.
        console.print(Text(text, style=style or ""), soft_wrap=True)


class WorkerStart:
    """What a data worker does first: it leaves the live progress bar to its parent, and prints to the real streams.

    Args:
        init: the loader's own ``worker_init_fn``, called after that.
    """

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, FileProxy):
                setattr(sys, name, stream.rich_proxied_file)
        if self.init is not None:
            self.init(worker)


class ConsoleHandler(logging.Handler):
    """Shows warnings and errors of the log on the console; everything else stays in the log file."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING if is_main_process() else logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if any(part in message for part in _NOISE):
            return
        style = "bold red" if record.levelno >= logging.ERROR else "yellow"
        console.print(
            f"[{style}]{record.levelname.lower()}:[/{style}] {escape(message)}",
            soft_wrap=True,
            highlight=False,
        )
