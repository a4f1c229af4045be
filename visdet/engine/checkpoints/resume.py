"""Resuming a run: the checkpoint is chosen, and read once in each process."""

import os
from pathlib import Path
from typing import Any

from mmengine.dist import all_gather_object, broadcast_object_list, get_rank, is_main_process

from ..errors import CheckpointError, DamagedCheckpointError
from .checkpoint import BEST, LAST, LAST_CHECKPOINT, read_checkpoint
from .newest import newest_named
from .run_state import refusal

AUTO = "auto"


def newest_readable_checkpoint(work_dir: str | Path, trust: bool = False) -> tuple[str | None, list[str]]:
    """Return the newest intact checkpoint of a run, or None, and a remark on each newer one that is passed over.

    The first candidate is the file that ``last_checkpoint`` names. The others are the other ``*.pth`` files of the
    folder, the newest first. If the folder has none, they are those of the folder that ``last_checkpoint`` names, which
    is another one if the checkpoint hook has an ``out_dir``. A file with weights but no training state is passed over.
    There is a remark on such a file only if ``last_checkpoint`` names it.

    Args:
        work_dir: the folder of the run.
        trust: see :func:`read_checkpoint`.

    Raises:
        CheckpointError: a file that may be intact cannot be read now, or can be read only with ``trust``. It is not
            passed over, because that could lose work.
    """
    path, _, remarks = _newest(work_dir, trust)
    return path, remarks


def _newest(work_dir: str | Path, trust: bool) -> tuple[str | None, dict[str, Any] | None, list[str]]:
    """Return what :func:`newest_readable_checkpoint` does, and the content of the checkpoint between."""
    folder = Path(work_dir)
    remarks = []
    named = Path(newest_named(folder))
    files = _checkpoints_in(folder)
    if not files and named.is_file():
        folder = named.parent
        files = _checkpoints_in(folder)
    files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    # Only the name counts, because the folder may have been moved or copied since.
    last = folder / named.name
    if last.is_file():
        files = [last, *(path for path in files if path != last)]
    elif last != folder:
        remarks.append(f"{Path(work_dir, LAST_CHECKPOINT)} names {last.name}, which does not exist")
    for path in files:
        try:
            content = read_checkpoint(path, trust=trust)
        except DamagedCheckpointError as error:
            remarks.append(str(error))
            continue
        if "optimizer" in content:
            return str(path), content, remarks
        if path == last:
            remarks.append(f"checkpoint {path} holds no training state")
    return None, None, remarks


def _checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder without the links to the newest and the best one."""
    # Another link may point at a file that has been removed.
    return [path for path in folder.glob("*.pth") if path.is_file() and path.name not in (LAST, BEST)]


def read_to_resume(
    resume: bool | str, load_from: str | None, work_dir: str, trust: bool = False
) -> tuple[str, dict[str, Any], list[str]] | None:
    """Return the checkpoint that a run continues from, its content, and remarks on newer files that are damaged.

    The main process chooses it for all processes, and each reads it once. The result is None if the run starts anew.

    Args:
        resume: 'auto' for the newest checkpoint of the work_dir, a checkpoint file, or the folder of another run.
            True means ``load_from``, or 'auto' if that is None, as in mmengine.
        load_from: the config's ``load_from``, which is used only if ``resume`` is True.
        work_dir: the folder of the run.
        trust: see :func:`read_checkpoint`.

    Raises:
        CheckpointError: ``resume`` is a folder without a checkpoint that can be resumed; ``resume`` is 'auto' and the
            work_dir has checkpoints, but none that can be resumed; the file has no training state; or a process cannot
            read it. Every process raises it.
    """
    path: str | None = None
    remarks: list[str] = []
    content = None
    problem = None
    if is_main_process():
        try:
            path, content, remarks = _choose(
                (load_from or AUTO) if resume is True else str(resume), work_dir, trust
            )
        except CheckpointError as error:
            problem = str(error)
    chosen: list[Any] = [path, remarks]
    broadcast_object_list(chosen, src=0)
    path, remarks = chosen
    if path is not None and content is None and problem is None:
        try:
            content = read_checkpoint(path, trust=trust)
        except CheckpointError as error:
            problem = f"{error} (read by process {get_rank()})"
    if first := next(filter(None, all_gather_object(problem)), None):
        raise CheckpointError(first)
    if path is None or content is None:
        return None
    parts = ("optimizer", "message_hub", "meta")
    if lacking := [part for part in parts if not isinstance(content.get(part), dict)]:
        raise CheckpointError(refusal(path, f"it has no {', '.join(lacking)}"))
    return path, content, remarks


def _choose(resume: str, work_dir: str, trust: bool) -> tuple[str | None, dict[str, Any] | None, list[str]]:
    is_auto = resume == AUTO
    if not (is_auto or os.path.isdir(resume)):
        return resume, read_checkpoint(resume, trust=trust), []
    folder = work_dir if is_auto else resume
    path, content, remarks = _newest(folder, trust)
    if path is None and (remarks or not is_auto):
        reasons = "".join(f"\n  {remark}" for remark in remarks) or " none of them holds a training state"
        advice = "; to begin anew, choose another --work-dir" if is_auto else ""
        raise CheckpointError(f"resume: no checkpoint in {folder} can be resumed:{reasons}{advice}")
    return path, content, remarks
