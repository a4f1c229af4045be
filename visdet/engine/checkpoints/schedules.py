"""Schedules of a run that is resumed. If its config has changed, they go on as if it had been so from the start."""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from mmengine.optim import _ParamScheduler
from torch.optim import Optimizer

from visdet.errors import listed

from .plain_state import to_plain

Schedules = list[_ParamScheduler] | dict[str, list[_ParamScheduler]] | None


def schedules_by_optimizer(schedules: Any) -> dict[str, list[Any]]:
    """Return the schedules of a run, or what there is of each of them, by the names of the optimizers.

    Those of a single optimizer, which are a list, have the name "".
    """
    return schedules if isinstance(schedules, dict) else {"": schedules or []}


def schedule_states(schedules: Schedules) -> list | dict | None:
    """Return the states of schedules in the form in which mmengine saves them.

    A function, which a checkpoint cannot hold, is left out: OneCycleLR has one, which a new schedule has, too.
    """
    states: dict[str, list] = {}
    for name, own in schedules_by_optimizer(schedules).items():
        states[name] = []
        for schedule in own:
            state = schedule.state_dict()
            states[name].append({key: value for key, value in state.items() if not callable(value)})
    return states if isinstance(schedules, dict) else states[""]


def options_of(optimizers: Mapping[str, Optimizer]) -> dict[str, list[dict[str, Any]]]:
    """Return the options of the parameter groups of each optimizer."""
    options: dict[str, list[dict[str, Any]]] = {}
    for name, optimizer in optimizers.items():
        options[name] = []
        for group in optimizer.param_groups:
            options[name].append({key: value for key, value in group.items() if key != "params"})
    return options


def recipe_of(optimizers: Mapping[str, Optimizer], schedules: Schedules) -> dict[str, Any]:
    """Return the options of the optimizers and the schedules, as the config gives them before the first iteration.

    A checkpoint holds them, so that a run that is resumed sees what its config has changed.
    """
    kinds = {}
    for name, own in schedules_by_optimizer(schedules).items():
        kinds[name] = [type(schedule).__name__ for schedule in own]
    recipe = {"options": options_of(optimizers), "schedules": schedule_states(schedules), "kinds": kinds}
    return to_plain(recipe, "the options of the optimizer and of param_scheduler")


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what the config has changed in a recipe, as text, such as ``lr 0.001 -> 0.0003, param_scheduler``."""
    found = []
    for name, groups in now["options"].items():
        for old, new in zip(before["options"].get(name, []), groups, strict=False):
            # A schedule may have changed an option already, and keeps the one of the config beside it.
            for key in [key for key in new if f"initial_{key}" not in new]:
                label = key.removeprefix("initial_")
                if key in old and old[key] != new[key]:
                    found.append(f"{label} {old[key]} -> {new[key]}")
    if any(before[part] != now[part] for part in ("schedules", "kinds")):
        found.append("param_scheduler")
    return listed(dict.fromkeys(found), 4)


def load_schedules(schedules: Schedules, saved: Any, is_trial: bool = False) -> None:
    """Give schedules the states of :func:`schedule_states`. As a trial, only copies of the schedules get them."""
    for name, own in schedules_by_optimizer(schedules).items():
        for schedule, state in zip(own, schedules_by_optimizer(saved).get(name, []), strict=False):
            target = copy.copy(schedule) if is_trial else schedule
            target.load_state_dict({"last_step": state["last_step"], **state})


def continue_changed(
    optimizers: Mapping[str, Optimizer],
    schedules: Schedules,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    saved: Any,
    counts: tuple[int, int, int | None],
) -> None:
    """Let the schedules and the options of a changed config go on where a checkpoint ends.

    Args:
        optimizers: the optimizers, whose options are those of the checkpoint.
        schedules: the schedules, just as the config has built them.
        before, now: the recipes of the run that is resumed and of this run.
        saved: the states of the schedules in the checkpoint.
        counts: the iterations and the epochs that are done, and the iterations of an epoch, or None.
    """
    for name, own in schedules_by_optimizer(schedules).items():
        groups = optimizers[name].param_groups
        rates = [group["lr"] for group in groups]
        for group, options in zip(groups, now["options"][name], strict=True):
            parameters = group["params"]
            group.clear()
            group.update({**options, "params": parameters})
        if not any(getattr(schedule, "need_val_args", False) for schedule in own):
            _replay(own, *counts)
        elif saved and before["kinds"].get(name) == now["kinds"][name]:
            for group, rate, old in zip(groups, rates, before["options"][name], strict=True):
                group["lr"] = rate * group["initial_lr"] / old["initial_lr"]
            states = schedules_by_optimizer(saved)[name]
            starts = schedules_by_optimizer(before["schedules"])[name]
            for schedule, state, start in zip(own, states, starts, strict=True):
                # What has changed since the start is what a schedule remembers; the rest is the config's.
                schedule.load_state_dict({key: value for key, value in state.items() if value != start[key]})


def _replay(schedules: list[_ParamScheduler], iterations: int, epochs: int, epoch_length: int | None) -> None:
    """Let schedules that have just been built take the steps of a run up to here.

    The rates are then those of a run that had these schedules from its start. This cannot be done for a schedule that
    follows a metric, such as ``ReduceOnPlateauLR``: beside one, the rates go on from those of the checkpoint.
    """
    epochs_done = 0
    with warnings.catch_warnings():  # mmengine would warn that the optimizer has made no update yet.
        warnings.simplefilter("ignore")
        for iteration in range(1, iterations + 1):
            _step(schedules, by_epoch=False)
            if epoch_length and iteration % epoch_length == 0 and epochs_done < epochs:
                _step(schedules, by_epoch=True)
                epochs_done += 1


def _step(schedules: list[_ParamScheduler], by_epoch: bool) -> None:
    for schedule in schedules:
        if schedule.by_epoch == by_epoch:
            schedule.step()
