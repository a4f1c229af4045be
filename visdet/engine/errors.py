"""One clear message, without a traceback, for a mistake in a config, a file or a command; a traceback for all else."""

import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from visdet.errors import ConfigError, UserError, hints_of

__all__ = [
    "CheckpointError",
    "ConfigError",
    "UserError",
    "explain",
    "log_fatal_error",
    "nearest_names",
    "tool_session",
]

SHOW_TRACEBACK = "VISDET_TRACEBACK"
_IN_A_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.")


class CheckpointError(UserError):
    """A checkpoint that is missing, unreadable, or made for another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file whose content is cut short, altered, or no checkpoint at all."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A checkpoint that is not there, or cannot be fetched."""


@contextmanager
def tool_session() -> Iterator[None]:
    """Run a tool's body: a :class:`UserError` ends in one message on stderr and exit status 1, all else in a traceback.

    ``VISDET_TRACEBACK=1`` in the environment shows the traceback of every error. The processes of a distributed run
    wait for each other at the end of the body and leave their group; after an error torchrun ends them.
    """
    try:
        yield
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    except KeyboardInterrupt:
        print("interrupted; `--resume` continues from the newest checkpoint", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        message = explain(error)
        if message is None or os.environ.get(SHOW_TRACEBACK):
            if sys.version_info < (3, 11):  # later versions print the hints below the traceback
                print("\n".join(hints_of(error)), file=sys.stderr)
            raise
        rank = os.environ.get("RANK")
        print(f"error{f' (rank {rank})' if rank else ''}: {message}", file=sys.stderr, flush=True)
        sys.exit(1)


def explain(error: BaseException) -> str | None:
    """Return the message of a user's mistake with its hints, or None for an error whose traceback must be seen."""
    if not isinstance(error, UserError):
        return None
    message = str(error)
    if _IN_A_WORKER.match(message):
        # A data loader raises a worker's error again, with the worker's traceback for its message.
        message = message.rsplit(f"{type(error).__qualname__}: ", 1)[-1].strip()
    return "\n".join([message, *(f"({hint})" for hint in hints_of(error))])


def log_fatal_error(logger: logging.Logger, error: BaseException) -> None:
    """Write an error to the log's files, and not to its terminal, where whoever started the run shows it."""
    message = explain(error)
    if isinstance(error, KeyboardInterrupt):
        message = "interrupted from the keyboard"
    elif message is None:
        message = "".join(traceback.format_exception(error)).rstrip()
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None, func="fatal error")
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def nearest_names(name: str, known: Iterable[str], cutoff: float = 0.6, count: int = 3) -> list[str]:
    """Return up to ``count`` names of ``known`` that resemble ``name``, the nearest first."""
    return difflib.get_close_matches(name, sorted(set(known)), n=count, cutoff=cutoff)
