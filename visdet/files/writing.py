"""The writer of every file that a user keeps."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, takewhile
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import BinaryIO

from visdet.errors import UnwrittenFileError, UserError

__all__ = ["is_device", "write_atomically", "written_whole"]


def is_device(path: str | os.PathLike) -> bool:
    """Return whether a path is that of a device, a pipe or a socket. The address of a file elsewhere is not."""
    return exists(path) and not (isfile(path) or isdir(path))


def write_atomically(path: str | os.PathLike, content: str | bytes | memoryview) -> None:
    """Replace the file at ``path`` in one step; see :func:`written_whole`. A text is written in UTF-8."""
    encoded = content.encode() if isinstance(content, str) else content
    with written_whole(path, len(encoded)) as partial:
        partial.write_bytes(encoded)


@contextmanager
def written_whole(
    path: str | os.PathLike, size: int | None = None, reaches_disk: bool = True
) -> Iterator[Path]:
    """Yield the name of a file that the block writes, and that replaces the file at ``path`` when the block ends.

    After a crash, or an error of any type, ``path`` holds either the old file or the complete new one. Nothing is left
    beside it, unless the process is killed; the next writer of the file removes what is left then. The name in the
    block has the suffix of ``path``, and no other process or thread has the same one.
    The folder is made if it is missing. What ``path`` links to is replaced, and not the link. A device such as
    ``/dev/stdout`` is written directly.

    Args:
        path: the file.
        size: the number of bytes, for the message.
        reaches_disk: whether to wait until the content has reached the disk, so that it outlives a loss of power.

    Raises:
        UnwrittenFileError: the file cannot be written, for example because the disk is full.
    """
    target = Path(os.path.realpath(path))
    try:
        if is_device(target):
            yield Path(path)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with _partial(target) as partial:
            yield partial
            if reaches_disk:
                _reach_disk(partial)
            os.replace(partial, target)
        if reaches_disk:
            _reach_disk(target.parent)
    except UserError:
        raise
    except OSError as error:
        bytes_of_it = "" if size is None else f" ({size} bytes)"
        raise UnwrittenFileError(
            f"file {path}{bytes_of_it} cannot be written: {error.strerror or error}. Files that were written before "
            "are unchanged"
        ) from error


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """Yield an empty file beside ``target`` for the block, and remove it if the block fails.

    A file is locked while it is written. The lock ends with the process, so that the next writer takes the name that a
    killed one has left, and removes what was written beside that one at the same time.
    """
    start, end = f".{target.stem}.partial", target.suffix
    names = (target.with_name(f"{start}{number or ''}{end}") for number in count())
    for partial in names:
        with open(partial, "ab") as file:
            if not _owns(file, partial):
                continue
            file.truncate(0)
            for left in takewhile(Path.exists, names):
                with open(left, "ab") as other:
                    if _owns(other, left):
                        left.unlink()
            try:
                yield partial
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            return


def _owns(file: BinaryIO, path: Path) -> bool:
    """Lock an open file, and return whether no other process has locked, renamed or removed it before."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # Some file systems have no locks.
    return path.exists() and os.path.samefile(file.fileno(), path)


def _reach_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
