"""Schedules of a run that is resumed. If its config has changed, they go on as if it had been so from the start."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.optim import _ParamScheduler
from torch.optim import Optimizer

from visdet.errors import listed

from .plain_state import to_plain

# A run has one optimizer. Checkpoints have the options and the kinds under the name that mmengine gives a single one.
_SINGLE = ""


def schedule_states(schedules: Sequence[_ParamScheduler]) -> list[dict[str, Any]]:
    """Return the states of schedules in the form in which mmengine saves them.

    A function, which a checkpoint cannot hold, is left out: OneCycleLR has one, which a new schedule has, too.
    """
    states = []
    for schedule in schedules:
        state = schedule.state_dict().items()
        states.append({key: value for key, value in state if not callable(value)})
    return states


def recipe_of(optimizer: Optimizer, schedules: Sequence[_ParamScheduler]) -> dict[str, Any]:
    """Return the options of the optimizer and the schedules, as the config gives them before the first iteration.

    A checkpoint holds them, so that a run that is resumed sees what its config has changed.
    """
    options = []
    for group in optimizer.param_groups:
        options.append({key: value for key, value in group.items() if key != "params"})
    kinds = [type(schedule).__name__ for schedule in schedules]
    states = schedule_states(schedules)
    recipe = {"options": {_SINGLE: options}, "schedules": states, "kinds": {_SINGLE: kinds}}
    return to_plain(recipe, "the options of the optimizer and of param_scheduler")


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what the config has changed in a recipe, as text, such as ``lr 0.001 -> 0.0003, param_scheduler``."""
    found: dict[str, None] = {}
    for old, new in zip(before["options"][_SINGLE], now["options"][_SINGLE], strict=False):
        for key, value in new.items():
            # A schedule may have changed an option already, and keeps the one of the config beside it.
            if f"initial_{key}" not in new and key in old and old[key] != value:
                found[f"{key.removeprefix('initial_')} {old[key]} -> {value}"] = None
    if before["schedules"] != now["schedules"] or before["kinds"] != now["kinds"]:
        found["param_scheduler"] = None
    return listed(found, 4)


def load_schedules(schedules: Sequence[_ParamScheduler], saved: Any, is_trial: bool = False) -> None:
    """Give schedules the states of :func:`schedule_states`. As a trial, only copies of the schedules get them."""
    for schedule, state in zip(schedules, saved or (), strict=False):
        target = copy.copy(schedule) if is_trial else schedule
        target.load_state_dict({"last_step": state["last_step"], **state})


def continue_changed(
    optimizer: Optimizer,
    schedules: Sequence[_ParamScheduler],
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    saved: Any,
    counts: tuple[int, int, int | None],
) -> None:
    """Let the schedules and the options of a changed config go on where a checkpoint ends.

    Args:
        optimizer: the optimizer, whose options are those of the checkpoint.
        schedules: the schedules, just as the config has built them.
        before, now: the recipes of the run that is resumed and of this run.
        saved: the states of the schedules in the checkpoint.
        counts: the iterations and the epochs that are done, and the iterations of an epoch, or None.
    """
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group, options in zip(groups, now["options"][_SINGLE], strict=True):
        parameters = group["params"]
        group.clear()
        group.update(options, params=parameters)
    if not any(getattr(schedule, "need_val_args", False) for schedule in schedules):
        _replay(schedules, *counts)
    elif saved and before["kinds"] == now["kinds"]:
        for group, rate, old in zip(groups, rates, before["options"][_SINGLE], strict=True):
            group["lr"] = rate * group["initial_lr"] / old["initial_lr"]
        for schedule, state, start in zip(schedules, saved, before["schedules"], strict=True):
            # What has changed since the start is what a schedule remembers; the rest is the config's.
            schedule.load_state_dict({key: value for key, value in state.items() if value != start[key]})


def _replay(
    schedules: Sequence[_ParamScheduler], iterations: int, epochs: int, epoch_length: int | None
) -> None:
    """Let schedules that have just been built take the steps of a run up to here.

    The rates are then those of a run that had these schedules from its start. This cannot be done for a schedule that
    follows a metric, such as ``ReduceOnPlateauLR``: beside one, the rates go on from those of the checkpoint.
    """
    ends = range(0, iterations + 1, epoch_length)[1 : epochs + 1] if epoch_length else ()
    with warnings.catch_warnings():  # mmengine would warn that the optimizer has made no update yet.
        warnings.simplefilter("ignore")
        for iteration in range(1, iterations + 1):
            _step(schedules, by_epoch=False)
            if iteration in ends:
                _step(schedules, by_epoch=True)


def _step(schedules: Sequence[_ParamScheduler], by_epoch: bool) -> None:
    for schedule in schedules:
        if schedule.by_epoch == by_epoch:
            schedule.step()
