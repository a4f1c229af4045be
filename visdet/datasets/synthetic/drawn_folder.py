"""Folders of data sets that are drawn instead of downloaded. A folder is complete, or it does not exist."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

from filelock import FileLock

from visdet.errors import InvalidInputError, UserError

_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends
# The folder that each existing data set reads.
_claims: weakref.WeakKeyDictionary[object, Path] = weakref.WeakKeyDictionary()


def claim_folder(owner: object, folder: str | Path) -> None:
    """Keep this process from replacing ``folder`` while ``owner`` exists."""
    _claims[owner] = Path(folder).resolve()


class ForeignFolderError(UserError, FileExistsError):
    """A folder to draw into that holds files which were not drawn."""


class UnwritableFolderError(UserError, OSError):
    """A folder to draw into that cannot be made."""


def draw_once(
    folder: str | Path,
    stamp_name: str,
    stamp: dict,
    maker: str,
    what: str,
    draw: Callable,
    num_workers: int | None,
) -> Path:
    """Let ``draw`` fill ``folder``, unless it already holds ``stamp``, and return the folder.

    Everything is written beside the folder and renamed at the end. Processes that start at the same time wait for the
    first one. A folder with another stamp is replaced if no data set of this process reads it; what somebody has put
    beside the drawn files stays. A folder without a stamp is replaced only if it is empty.

    Args:
        folder: the folder to write.
        stamp_name: the file in the folder that holds the stamp.
        stamp: the values that determine the content, as JSON.
        maker: the name of the function, for errors.
        what: the description of the content, for the message.
        draw: the function that writes the content, given a folder, the stamp and ``num_workers``.
        num_workers: see :func:`draw_each`.

    Raises:
        ForeignFolderError: the folder is not empty and has no stamp, or it is a file.
        UnwritableFolderError: the folder cannot be made.
        InvalidInputError: the folder has another stamp, and a data set of this process reads it.
    """
    folder = Path(folder)
    parent = folder.parent
    stamp_file = folder / stamp_name
    if _read_stamp(stamp_file) == stamp:
        return folder
    if folder.is_file():
        raise ForeignFolderError(f"{maker}: {folder} is a file. Give a folder to draw into")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UnwritableFolderError(
            f"{maker}: folder {folder} cannot be written: {error.strerror or error}. Give another one"
        ) from error
    with FileLock(parent / f".{folder.name}.lock"):
        held = _read_stamp(stamp_file)
        if held == stamp:
            return folder
        place = folder.resolve()
        if held is None:
            if folder.exists() and any(folder.iterdir()):
                raise ForeignFolderError(
                    f"{maker}: {place} is not empty and has no {stamp_name}, so it was not made by {maker}. If it "
                    "holds a data set of your own, set the type of the data sets in your config, for example "
                    "type='CocoDataset'. Otherwise give another data_root"
                )
        elif place in _claims.values():
            keys = [key for key in {**held, **stamp} if held.get(key) != stamp.get(key)]
            raise InvalidInputError(
                f"{maker}: {folder} is read by another data set of this run and holds {_listed(held, keys)}, not "
                f"{_listed(stamp, keys)}. Give data sets with different generator arguments different values of "
                "data_root"
            )
        start = monotonic()
        print(f"drawing {what} into {folder} …", flush=True)
        _write_and_rename(folder, stamp_name, stamp, draw, num_workers)
        print(f"drew them in {monotonic() - start:.0f} s", flush=True)
    return folder


def _listed(stamp: dict, keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={stamp.get(key)}" for key in keys)


def _write_and_rename(
    folder: Path, stamp_name: str, stamp: dict, draw: Callable, num_workers: int | None
) -> None:
    start = f".{folder.name}.partial-"
    for leftover in folder.parent.glob(f"{start}*"):  # of runs that were killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=start, dir=folder.parent) as place:
        partial = Path(place, "drawn")
        partial.mkdir()
        draw(partial, stamp, num_workers)
        (partial / stamp_name).write_text(json.dumps(stamp, indent=1) + "\n")
        replaced = Path(place, "replaced")
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
        for old in replaced.glob("*"):
            kept = folder / old.name
            if not kept.exists():  # It was not drawn, such as anchors.
                old.rename(kept)


def _read_stamp(path: Path) -> dict | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return json.loads(path.read_text())
    return None


def draw_each(draw: Callable, tasks: Sequence[tuple], num_workers: int | None) -> list[Any]:
    """Return the results of ``draw(*task)`` in the order of the tasks, which several processes share.

    Args:
        draw: the function that draws a part of the data set.
        tasks: its arguments for each part.
        num_workers: number of processes. The default is one per core. One worker is this process itself.

    Raises:
        RuntimeError: a process was killed. An error of ``draw`` is raised as it is.
    """
    num_workers = num_workers or len(os.sched_getaffinity(0))
    if num_workers == 1:
        return [draw(*task) for task in tasks]
    # The processes are forked, because they need only numpy and an imaging library and need not import torch again.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_workers, context, _be_a_quiet_worker, (os.getpid(),)) as workers:
        return list(workers.map(draw, *zip(*tasks, strict=True)))


def _be_a_quiet_worker(parent: int) -> None:
    """Let the parent alone report Ctrl-C, which all processes get, and end this process with its parent."""
    # The process ends with its parent, even if that is killed, and at once if that was killed before this line.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    import cv2

    cv2.setNumThreads(0)  # The threads of the parent do not exist in a process that is forked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
