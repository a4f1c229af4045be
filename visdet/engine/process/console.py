"""The rich console that a run writes to, and the log handler that shows warnings and errors on it."""

import logging
import os
import signal
import sys
from collections.abc import Callable

from mmengine.logging import print_log
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.markup import escape
from rich.text import Text

from .process_group import joined_process_group

console = Console(highlight=False)

# Warnings of mmengine that contain one of these texts are about its own internals. A user cannot act on them, and the
# last one is repeated for every parameter of a frozen stage.
_NOISE = (
    '"FileClient" will be deprecated',
    '"HardDiskBackend" is the alias',
    "The prefix is not set in metric",
    "is skipped since its requires_grad=False",
)


def is_main_process() -> bool:
    """Return whether this process writes to the terminal. This works before the process group exists, too."""
    group = joined_process_group()
    return (group.get_rank() if group else int(os.environ.get("RANK", 0))) == 0


def say(text: str, style: str | None = None) -> None:
    """Print one line, without wrapping it, from the main process. A live progress bar stays below the line."""
    if is_main_process():
        # The style belongs to a Text, because a style given to print() would also colour the bar below.
        console.print(Text(text, style=style or ""), soft_wrap=True)


def warn(message: str) -> None:
    """Write a warning to the log of the run."""
    print_log(message, logger="current", level=logging.WARNING)


def start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Make a data worker print to the real streams, not above its parent's progress bar, and then call ``init``."""
    for number in (
        signal.SIGINT,
        signal.SIGUSR1,
    ):  # The training process ends its workers after the iteration.
        signal.signal(number, signal.SIG_IGN)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)
    if init is not None:
        init(worker)


class ConsoleHandler(logging.Handler):
    """Shows warnings and errors of the log on the console. Processes other than the main one show errors only."""

    stream = sys.__stdout__  # mmengine's MLflow backend asks each handler whether its stream is closed

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
