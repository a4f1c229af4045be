"""Errors of the tools. A user's mistake ends in a message without a traceback, any other error in a traceback."""

import difflib
import errno
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from visdet.errors import ConfigError, UserError, hints_of

from .process.interrupts import Interrupted, signals_interrupt
from .process.process_group import leave_process_group

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
_LOG_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"  # as mmengine's
# What a file or a disk of the user refuses is no bug, wherever it is met.
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT}
_OF_A_FILE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENAMETOOLONG}
_IN_A_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.")


class CheckpointError(UserError):
    """A checkpoint that is missing, unreadable, or made for another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file whose content is truncated, altered, or not a checkpoint at all."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A checkpoint that does not exist or cannot be downloaded."""


@contextmanager
def tool_session() -> Iterator[None]:
    """Report the errors of the block, which is the body of a command-line tool.

    A :class:`UserError`, and a file or a disk that refuses, end the tool with one message on stderr and exit status 1.
    Ctrl-C, SIGTERM and SIGHUP end it
    with a message and exit status 128 plus the number of the signal. Any other error keeps its traceback, and
    ``VISDET_TRACEBACK=1`` in the environment shows the traceback of a :class:`UserError`, too.

    The processes of a distributed run wait for each other at the end of the body and then leave their group. After
    an error, torchrun ends them.
    """
    with signals_interrupt() as received:
        try:
            yield
            leave_process_group()
        except (KeyboardInterrupt, Exception) as error:
            # An error after a signal is a consequence of the signal, which data workers and other processes get, too.
            if received or isinstance(error, KeyboardInterrupt):
                number = received[0] if received else getattr(error, "number", signal.SIGINT)
                if os.environ.get("RANK", "0") == "0":  # The main process alone says it.
                    print(
                        "; ".join([str(Interrupted(number)), *hints_of(error)]), file=sys.stderr, flush=True
                    )
                sys.exit(128 + number)
            message = explain(error)
            if message is None or os.environ.get(SHOW_TRACEBACK):
                if sys.version_info < (3, 11):  # Later versions print the hints below the traceback.
                    print("\n".join(hints_of(error)), file=sys.stderr)
                raise
            rank = os.environ.get("RANK")
            print(f"error{f' (rank {rank})' if rank else ''}: {message}", file=sys.stderr, flush=True)
            sys.exit(1)


def explain(error: BaseException) -> str | None:
    """Return the message of a :class:`UserError`, or of a file or a disk that refuses, with hints. Else return None."""
    message = str(error)
    if not isinstance(error, UserError):
        if not isinstance(error, OSError):
            return None
        file = error.filename
        if error.errno not in _OF_THE_DISK and (error.errno not in _OF_A_FILE or file is None):
            return None
        message = f"cannot use {file}: {error.strerror}" if file else f"cannot write: {error.strerror}"
    if _IN_A_WORKER.match(message):
        # A data loader raises a worker's error again and puts the worker's traceback into the message.
        message = message.rsplit(f"{type(error).__qualname__}: ", 1)[-1].strip()
    return "\n".join([message, *(f"({hint})" for hint in hints_of(error))])


def log_fatal_error(logger: logging.Logger, error: BaseException, log_file: str | None = None) -> None:
    """Write an error to the files of a log, but not to the terminal, where :func:`tool_session` reports it.

    Args:
        logger: the logger of the run.
        error: the error that ends the run.
        log_file: the file to write to if the logger has none, as in all processes but the main one.
    """
    message = explain(error)
    if isinstance(error, KeyboardInterrupt):
        message = str(error) or "interrupted from the keyboard"
    elif message is None:
        message = "".join(traceback.format_exception(error)).rstrip()
    if rank := os.environ.get("RANK"):
        message = f"(rank {rank}) {message}"
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None, func="fatal error")
    files = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    if not files and log_file is not None:
        files = [logging.FileHandler(log_file, delay=True)]
        files[0].setFormatter(logging.Formatter(_LOG_FORMAT, "%Y/%m/%d %H:%M:%S"))
    for handler in files:
        handler.handle(record)


def nearest_names(name: str, known: Iterable[str], cutoff: float = 0.6, count: int = 3) -> list[str]:
    """Return the names of ``known`` that resemble ``name``, the most similar first.

    Args:
        name: a name that may be misspelt.
        known: the names to choose from.
        cutoff: the minimum similarity, between 0 and 1, as for ``difflib.get_close_matches``.
        count: the maximum number of names to return.
    """
    return difflib.get_close_matches(name, sorted(set(known)), n=count, cutoff=cutoff)
