"""Folders of data sets that are drawn instead of downloaded: whole or not there at all, whatever happens meanwhile."""

import contextlib
import json
import multiprocessing
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from visdet.errors import InvalidInputError, UserError

__all__ = ["claim_folder", "draw_in_processes", "draw_once", "is_orphan"]


# Which folder each living data set reads.
_claims: weakref.WeakKeyDictionary[object, Path] = weakref.WeakKeyDictionary()


def claim_folder(owner: object, folder: str | Path) -> None:
    """Keep ``folder`` from being replaced while ``owner`` lives, by this process."""
    _claims[owner] = Path(folder).resolve()


class ForeignFolderError(UserError, FileExistsError):
    """A folder to draw into that holds somebody else's files."""


def draw_once(
    folder: str | Path, stamp_name: str, stamp: dict, maker: str, what: str, draw: Callable
) -> Path:
    """Let ``draw(partial_folder)`` fill ``folder``, unless it holds ``stamp`` already, and return the folder.

    Everything is written beside the folder and renamed at the end. Processes that start at once wait for the first
    one. A folder with another stamp is replaced, if no data set of this process reads it; one without a stamp is never
    touched.

    Args:
        folder: where to write.
        stamp_name: file within it that holds the stamp.
        stamp: what decides about the content, JSON.
        maker: the function to name in errors.
        what: to say what is drawn.
        draw: writes the content.

    Raises:
        ForeignFolderError: the folder is not empty and has no stamp.
        InvalidInputError: the folder has another stamp, and a data set of this process reads it.
    """
    folder = Path(folder)
    if _read_stamp(folder / stamp_name) == stamp:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if _read_stamp(folder / stamp_name) == stamp:
            return folder
        if folder.exists() and any(folder.iterdir()) and _read_stamp(folder / stamp_name) is None:
            raise ForeignFolderError(
                f"{maker}: {folder.resolve()} is not empty and has no {stamp_name}, so it was not made by "
                f"{maker}. If it holds a data set of your own, set the type of the data sets in your config, for "
                "example type='CocoDataset'; otherwise give another data_root"
            )
        _refuse_to_replace_a_claimed(folder, _read_stamp(folder / stamp_name), stamp, maker)
        start = time.monotonic()
        print(f"drawing {what} into {folder} …", flush=True)
        _write_and_rename(folder, stamp_name, stamp, draw)
        print(f"drew them in {time.monotonic() - start:.0f} s", flush=True)
    return folder


def _refuse_to_replace_a_claimed(folder: Path, held: dict | None, wanted: dict, maker: str) -> None:
    if held is not None and folder.resolve() in _claims.values():
        keys = [key for key in {**held, **wanted} if held.get(key) != wanted.get(key)]
        raise InvalidInputError(
            f"{maker}: {folder} is read by another data set of this run and holds "
            f"{', '.join(f'{key}={held.get(key)}' for key in keys)}, not "
            f"{', '.join(f'{key}={wanted.get(key)}' for key in keys)}; give data sets of different generator arguments "
            "different values of data_root"
        )


def _write_and_rename(folder: Path, stamp_name: str, stamp: dict, draw: Callable) -> None:
    _remove_leftovers(folder)  # of a run that was killed
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    partial.chmod(0o755)
    try:
        draw(partial)
        (partial / stamp_name).write_text(json.dumps(stamp, indent=1) + "\n")
        if folder.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
            folder.rename(replaced / folder.name)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _remove_leftovers(folder)


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _read_stamp(path: Path) -> dict | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return json.loads(path.read_text())
    return None


def draw_in_processes(draw_share: Callable, arguments: tuple, num_workers: int | None, maker: str) -> None:
    """Run ``draw_share(*arguments, worker, num_workers, parent)`` in processes, by default one per core.

    A share should stop where :func:`is_orphan` says that its parent was killed.

    Raises:
        RuntimeError: a process failed.
    """
    num_workers = num_workers or len(os.sched_getaffinity(0))
    # Forked: the children draw with numpy and an imaging library alone, and need not import torch again.
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=draw_share, args=(*arguments, worker, num_workers, os.getpid()))
        for worker in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failed = [worker.exitcode for worker in workers if worker.exitcode != 0]
    if failed:
        raise RuntimeError(
            f"{maker}: {len(failed)} of {num_workers} drawing processes failed, exit codes {failed}"
        )


def is_orphan(parent: int) -> bool:
    """Return whether the parent of this process was killed, so that nobody waits for its share."""
    return os.getppid() != parent
