"""What a checkpoint holds of a run: its weights, its counts, and the state of optimizers and schedules."""

import time
from typing import Any

import mmengine
from mmengine.runner.checkpoint import weights_to_cpu

from ..optim.wrappers import optimizers_of, unwrapped
from .score_thresholds import thresholds_of


def training_state(
    runner: Any, meta: dict[str, Any], save_optimizer: bool, save_param_scheduler: bool
) -> dict[str, Any]:
    """Return the state of a run in mmengine's layout.

    Args:
        runner: the run.
        meta: what 'meta' holds besides.
        save_optimizer, save_param_scheduler: whether the state of the optimizers and of the schedules is in it.
    """
    model = unwrapped(runner.model)
    optimizers = optimizers_of(runner.optim_wrapper)
    state = {
        "meta": {
            **meta,
            "cfg": runner.cfg.pretty_text,
            "seed": runner.seed,
            "experiment_name": runner.experiment_name,
            "time": time.strftime("%Y%m%d_%H%M%S"),
            "mmengine_version": mmengine.__version__,
            "dataset_meta": getattr(runner.train_dataloader.dataset, "metainfo", None),
            "category_ids": _category_ids(runner.train_dataloader.dataset),
            "score_thresholds": _own_thresholds(runner, meta.get("iter")),
            "iterations_per_epoch": len(runner.train_dataloader),
            "optimizers": {name: type(optimizer).__name__ for name, optimizer in optimizers.items()},
        },
        "state_dict": weights_to_cpu(model.state_dict()),
        "message_hub": runner.message_hub.state_dict(),
    }
    if save_optimizer:
        state["optimizer"] = runner.optim_wrapper.state_dict()
    if save_param_scheduler and runner.param_schedulers is not None:
        state["param_schedulers"] = _states(runner.param_schedulers)
    return state


def _category_ids(dataset: Any) -> list[Any] | None:
    """Return the number of each class in the annotation file of a data set, which may be within others, or None."""
    while not hasattr(dataset, "category_ids"):
        inner = [getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())]
        if not (inner := [one for one in inner if one is not None]):
            return None
        dataset = inner[0]
    return list(dataset.category_ids)


def _own_thresholds(runner: Any, iteration: int | None) -> dict[str, float]:
    """Return the thresholds of scores of the validation after this iteration, if there has been one."""
    was_validated = iteration is not None and runner.message_hub.get_info("validated_at_iter") == iteration
    return thresholds_of(runner.val_loop.evaluator.metrics) if was_validated and runner.val_loop else {}


def _states(schedules: list | dict) -> list | dict:
    """Return the states of schedules, which are given as a list or as a dict of lists by the names of optimizers.

    A function, which a checkpoint cannot hold, is left out: OneCycleLR has one, which a new schedule has, too.
    """
    if isinstance(schedules, dict):
        return {name: _states(of_one_optimizer) for name, of_one_optimizer in schedules.items()}
    return [
        {name: value for name, value in schedule.state_dict().items() if not callable(value)}
        for schedule in schedules
    ]
