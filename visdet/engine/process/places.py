"""The places that a run or a tool writes to, which are checked before the work."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import UserError

_OF_A_RUN = ("*.pth", "last_checkpoint", "*/vis_data/*.json")
_LOCK = ".training.lock"
# The data workers of a run that was killed end within five seconds, and hold its lock until then.
_PATIENCE = 8.0


def short_path(path: str) -> str:
    """Return ``path`` relative to the current folder if it lies below that folder, otherwise ``path`` itself."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def free_folder(folder: str, for_training: bool = True) -> str:
    """Return the first of ``folder``, ``folder_2``, ``folder_3`` … that holds no run.

    A training that ended before it wrote a checkpoint or numbers leaves its folder, and its log there, to the next one.

    Args:
        folder: the folder.
        for_training: whether a training is to write there. Otherwise, every folder with a log holds a run.
    """
    place = folder
    number = 1
    while _holds_run(Path(place), for_training):
        number += 1
        place = f"{folder}_{number}"
    return place


def _holds_run(place: Path, for_training: bool) -> bool:
    if any(any(place.glob(pattern)) for pattern in _OF_A_RUN):
        return True
    has_log = any(place.glob("*/*.log"))
    return has_log and not (for_training and _is_left(place))


def _is_left(place: Path) -> bool:
    """Return whether no process trains in a folder, and no test has written its results there."""
    if any(place.glob("*_*/*.json")):
        return False
    try:
        with FileLock(place / _LOCK, timeout=0):
            return True
    except (OSError, RuntimeError):  # It is in use, or its file system has no locks.
        return False


def check_work_dir(work_dir: str | os.PathLike[str], option: str = "--work-dir") -> None:
    """Create ``work_dir`` and write a temporary file in it, so that a run fails early and not at its first checkpoint.

    Args:
        work_dir: the folder.
        option: the option of the command line by which the user chooses the folder, for the message.

    Raises:
        UserError: the folder cannot be written. The message names the folder and the reason.
    """
    try:
        os.makedirs(work_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=work_dir) as file:
            file.write(b"\0")
    except (OSError, ValueError) as error:
        is_file = isinstance(error, FileExistsError)
        reason = "it is a file" if is_file else getattr(error, "strerror", None) or error
        raise UserError(
            f"folder {work_dir} cannot be written: {reason}; choose another one with {option}"
        ) from error


@contextmanager
def no_empty_folders(*folders: str | os.PathLike[str] | None) -> Iterator[None]:
    """Remove those of the folders and their parents that the block has made, and left empty because it failed.

    A folder that is None or "" is left out.
    """
    new = []
    given: Iterator[str | os.PathLike[str]] = filter(None, folders)
    for folder in map(Path, given):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        new += missing[-1:]
    try:
        yield
    except BaseException:
        for folder in new:
            for path, _, _ in os.walk(folder, topdown=False):
                with suppress(OSError):  # It is not empty.
                    os.rmdir(path)
        raise


def check_out_file(path: str | Path, option: str = "--out") -> None:
    """Create the folder of a file and check that the file can be written.

    Raises:
        UserError: it cannot. The message names the file or its folder and the reason.
    """
    path = Path(path)
    check_work_dir(path.parent, option)
    is_folder = path.is_dir()
    if is_folder or (path.exists() and not os.access(path, os.W_OK)):
        reason = "it is a folder" if is_folder else "Permission denied"
        raise UserError(f"file {path} cannot be written: {reason}; choose another name with {option}")


def check_free_space(folder: str | Path, num_bytes: int, what: str) -> None:
    """Check that ``num_bytes`` fit on the disk of a folder.

    Raises:
        UserError: they do not fit. The message begins with ``what``, which takes the space.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise UserError(
            f"{what} takes about {num_bytes / 1e6:.0f} MB, but the disk of {folder} has {free / 1e6:.0f} MB left"
        )


@contextmanager
def only_training_in(work_dir: str | Path) -> Iterator[None]:
    """Keep other trainings out of ``work_dir`` while the block runs. The system ends this when the process ends.

    File systems without locks are left as they are.

    Raises:
        UserError: another process trains there.
    """
    lock = FileLock(Path(work_dir, _LOCK))
    try:
        lock.acquire(timeout=_PATIENCE)
    # Some versions raise a RuntimeError if this process has the lock itself.
    except (Timeout, RuntimeError) as error:
        raise UserError(
            f"another training is running in {work_dir}, and would overwrite the checkpoints of this one. Wait for its "
            "end, or choose another folder with --work-dir"
        ) from error
    except (OSError, NotImplementedError):
        pass
    try:
        yield
    finally:
        lock.release()
