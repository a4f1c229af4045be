"""Errors of the tools. A user's mistake ends in a message without a traceback, any other error in a traceback."""

import difflib
import logging
import os
import re
import traceback
from collections.abc import Iterable
from errno import EACCES, EDQUOT, EISDIR, EMFILE, ENAMETOOLONG, ENFILE, ENOMEM, ENOSPC, EPERM, EROFS

from visdet.errors import ConfigError, UserError, hints_of

__all__ = [
    "CheckpointError",
    "ConfigError",
    "UserError",
    "explain",
    "first_line",
    "log_fatal_error",
    "nearest_names",
]

_LOG_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"  # as mmengine's
# What a file or a disk of the user refuses is no bug, wherever it is met.
_OF_THE_DISK = {ENOSPC, EDQUOT}
_OF_HANDLES = {EMFILE, ENFILE}
_OF_MEMORY = re.compile(
    "(can't|cannot) allocate memory|out of memory", re.IGNORECASE
)  # as torch and CUDA say it
_OF_A_FILE = {EACCES, EPERM, EROFS, EISDIR, ENAMETOOLONG}
_IN_A_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.")


class CheckpointError(UserError):
    """A checkpoint that is missing, unreadable, or made for another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file whose content is truncated, altered, or not a checkpoint at all."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A checkpoint that does not exist or cannot be downloaded."""


def explain(error: BaseException) -> str | None:
    """Return the message of a :class:`UserError`, or of a file or a disk that refuses, with hints. Else return None."""
    message: str | None = str(error)
    if not isinstance(error, UserError):
        message = _of_memory(error) if is_out_of_memory(error) else _of_system(error)
    if message is None:
        return None
    if _IN_A_WORKER.match(message):
        # A data loader raises a worker's error again and puts the worker's traceback into the message.
        message = message.rsplit(f"{type(error).__qualname__}: ", 1)[-1].strip()
    return "\n".join([message, *(f"({hint})" for hint in hints_of(error))])


def first_line(text: object) -> str:
    """Return the first line of an error's message, or of another text."""
    return str(text).strip().partition("\n")[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory of the machine or of a GPU does not suffice."""
    of_torch = isinstance(error, RuntimeError) and bool(_OF_MEMORY.search(str(error)))
    return isinstance(error, MemoryError) or of_torch or getattr(error, "errno", None) == ENOMEM


def _of_memory(error: BaseException) -> str:
    said = first_line(error)[:300]
    return (
        f"the memory does not suffice: {said or type(error).__name__}. Lower batch_size or num_workers of the "
        "data loader or the size of the images, or use a machine with more memory"
    )


def _of_system(error: BaseException) -> str | None:
    """Return the message of a file, a disk or a limit of the system that refuses, or None for any other error."""
    if not isinstance(error, OSError):
        return None
    file = error.filename
    reason = error.strerror
    number = error.errno
    if number in _OF_HANDLES:
        return f"cannot open {file or 'a file'}: {reason}. Raise the limit by `ulimit -n 65536`, or lower num_workers"
    if number not in _OF_THE_DISK and (number not in _OF_A_FILE or file is None):
        return None
    return f"cannot use {file}: {reason}" if file else f"cannot write: {reason}"


def log_fatal_error(logger: logging.Logger, error: BaseException, log_file: str | None = None) -> None:
    """Write an error to the files of a log, but not to the terminal, where ``tool_session`` reports it.

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
    kind = logging.FileHandler
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, message, (), None, func="fatal error")
    files = [handler for handler in logger.handlers if isinstance(handler, kind)]
    if not files and log_file is not None:
        file = kind(log_file, delay=True)
        file.setFormatter(logging.Formatter(_LOG_FORMAT, "%Y/%m/%d %H:%M:%S"))
        files.append(file)
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
