"""The choice of the checkpoint that a run continues from, which the main process makes for all processes."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from mmengine.dist import all_gather_object, broadcast_object_list, get_rank, is_main_process
from mmengine.hooks import EMAHook

from visdet.structures.coco_json import listed

from ..errors import CheckpointError, DamagedCheckpointError
from .checkpoint import LAST_CHECKPOINT, read_checkpoint
from .plain_state import to_plain

AUTO = "auto"
# What torch's optimizers remember of each number of a parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
_Decided = TypeVar("_Decided")


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
    folder = Path(work_dir)
    pointer = folder / LAST_CHECKPOINT
    named = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
    if named and not any(folder.glob("*.pth")) and Path(named).is_file():
        folder = Path(named).parent
    # A link may point at a file that has been removed.
    files = [path for path in folder.glob("*.pth") if path.is_file()]
    candidates = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    last, remarks = None, []
    if named:
        # Only the name counts, because the folder may have been moved or copied since.
        last = folder / Path(named).name
        if last.is_file():
            candidates = [last, *(path for path in candidates if path != last)]
        else:
            remarks.append(f"{pointer} names {last.name}, which does not exist")
    for path in candidates:
        try:
            content = read_checkpoint(path, trust=trust)
        except DamagedCheckpointError as error:
            remarks.append(str(error))
            continue
        if "optimizer" in content:
            return str(path), remarks
        if path == last:
            remarks.append(f"checkpoint {path} holds no training state")
    return None, remarks


def checkpoint_to_resume(
    resume: bool | str, load_from: str | None, work_dir: str, trust: bool = False
) -> tuple[str | None, list[str]]:
    """Return the checkpoint that a run continues from, or None if it starts anew, and remarks for the log.

    Args:
        resume: 'auto' for the newest checkpoint of the work_dir, a checkpoint file, or the folder of another run.
            True means ``load_from``, or 'auto' if that is None, as in mmengine.
        load_from: the config's ``load_from``, which is used only if ``resume`` is True.
        work_dir: the folder of the run.
        trust: see :func:`read_checkpoint`.

    Raises:
        CheckpointError: ``resume`` is a folder without a checkpoint that can be resumed; ``resume`` is 'auto' and the
            work_dir has checkpoints, but none that can be resumed; or :func:`newest_readable_checkpoint` raises it.
    """
    if resume is True:
        resume = load_from or AUTO
    folder = work_dir if resume == AUTO else str(resume)
    if not os.path.isdir(folder):
        return (None, []) if resume == AUTO else (folder, [])
    found, remarks = newest_readable_checkpoint(folder, trust)
    if found is None and (remarks or resume != AUTO):
        reasons = "".join(f"\n  {remark}" for remark in remarks) or " none of them holds a training state"
        advice = "; to begin anew, choose another --work-dir" if resume == AUTO else ""
        raise CheckpointError(f"resume: no checkpoint in {folder} can be resumed:{reasons}{advice}")
    return found, remarks


def decided_by_the_main_process(decide: Callable[[], _Decided]) -> _Decided:
    """Call ``decide`` on the main process only and return its result on every process.

    Raises:
        CheckpointError: ``decide`` raised one on the main process. Every process raises it.
    """
    outcome: list[Any] = [None, None]
    if is_main_process():
        try:
            outcome[0] = decide()
        except CheckpointError as error:
            outcome[1] = str(error)
    broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    return outcome[0]


@contextmanager
def restoring(path: str, part: str) -> Iterator[None]:
    """Turn an error in restoring a part of a checkpoint into a CheckpointError that names the part."""
    try:
        yield
    except CheckpointError:
        raise
    except (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be resumed: its {part} cannot be restored ({type(error).__name__}: "
            f"{str(error)[:200]}). To start training from its weights, drop --resume and use --cfg-options "
            f"load_from={path}"
        ) from error


def check_restored(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if an optimizer cannot go on with the state that it has loaded.

    torch does not compare shapes: a fused optimizer would read and write beyond the memory of a smaller tensor.
    """
    for number, group in enumerate(optimizer.param_groups):
        if lacking := sorted(set(optimizer.defaults) - set(group)):
            raise ValueError(f"param_groups[{number}] has no {', '.join(lacking)}")
        for position, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter, {})
            for key in set(_MOMENTS).intersection(state):
                shape = tuple(getattr(state[key], "shape", ()))
                if state[key] is not None and shape != parameter.shape:
                    raise ValueError(
                        f"parameter {position} of param_groups[{number}] has {key} of shape {shape}, not "
                        f"{tuple(parameter.shape)}"
                    )


def ema_remarks(checkpoint: dict[str, Any], hooks: Sequence[Any], path: str) -> list[str]:
    """Return a remark if a checkpoint has an average of weights that no hook of the run continues."""
    if "ema_state_dict" not in checkpoint or any(isinstance(hook, EMAHook) for hook in hooks):
        return []
    # mmengine exchanges the two, so that an evaluation reads the averages.
    return [
        f"{path} comes from a run with EMAHook, but the config has none. Training goes on from the averaged weights"
    ]


def restore_optimizer(
    wrapper: Any, optimizers: Sequence[torch.optim.Optimizer], saved: dict, path: str
) -> list[str]:
    """Load the saved state of an optimizer wrapper, and return a remark if it replaces numbers of the config.

    Args:
        wrapper: the wrapper.
        optimizers: its optimizers.
        saved: the state.
        path: the checkpoint, for messages.
    """
    configured = [optimizer.param_groups for optimizer in optimizers]
    with restoring(path, "optimizer"):
        wrapper.load_state_dict(saved)
        for optimizer in optimizers:
            check_restored(optimizer)
    changes = {
        f"{key} {group[key]} instead of the config's {before[key]}": None
        for groups, optimizer in zip(configured, optimizers, strict=True)
        for before, group in zip(groups, optimizer.param_groups, strict=False)
        # Schedules change lr, but not initial_lr.
        for key in ("initial_lr", "weight_decay", "momentum", "betas", "eps")
        if len(groups) == len(optimizer.param_groups) and key in before and key in group
        if to_plain(group[key]) != to_plain(before[key])
    }
    return [f"{path} keeps the numbers of its optimizer: {listed(changes, 4)}"] if changes else []


def restore_schedules(schedules: Any, saved: Any, path: str) -> list[str]:
    """Load the saved states of schedules, and return a remark if there are fewer or more states than schedules.

    Args:
        schedules: the schedules, as a list or as a dict of lists by the names of optimizers.
        saved: their states, in the same form.
        path: the checkpoint, for messages.
    """
    remarks = []
    by_name = schedules if isinstance(schedules, dict) else {"": schedules}
    states_by_name = (saved or {}) if isinstance(schedules, dict) else {"": saved}
    for name, own in by_name.items():
        part = f"param_schedulers[{name!r}]" if name else "param_schedulers"
        with restoring(path, part):
            states = states_by_name.get(name) or []
            for schedule, state in zip(own, states, strict=False):
                if lacking := {"last_step", "base_values"} & (vars(schedule).keys() - state):
                    raise ValueError(f"a schedule has no {', '.join(sorted(lacking))}")
                schedule.load_state_dict(state)
        if len(states) != len(own):
            remarks.append(
                f"{path} has the states of {len(states)} schedules in {part}, but the config has {len(own)} schedules. "
                "One without a state begins anew"
            )
    return remarks


def read_on_every_process(path: str, trust: bool) -> dict[str, Any]:
    """Return the content of a checkpoint, which every process reads for itself.

    Raises:
        CheckpointError: a process cannot read the file. Every process raises the error of the lowest such rank.
    """
    checkpoint, problem = {}, None
    try:
        checkpoint = read_checkpoint(path, trust=trust)
    except CheckpointError as error:
        problem = f"{error} (read by process {get_rank()})" if get_rank() else str(error)
    problems = [found for found in all_gather_object(problem) if found is not None]
    if problems:
        raise CheckpointError(problems[0])
    return checkpoint
