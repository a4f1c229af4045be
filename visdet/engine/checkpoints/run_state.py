"""All that a checkpoint holds of a run, collected and restored name by name.

| name | holds |
|---|---|
| ``state_dict`` | the weights; with ``EMAHook``, their averages, and ``ema_state_dict`` the weights themselves |
| ``optimizer``, ``param_schedulers`` | the states of the optimizers and of the schedules |
| ``message_hub`` | the histories of the log, and facts such as the best score |
| ``hooks`` | what hooks remember, by their classes: those with ``state_dict`` and ``load_state_dict``, and mmengine's |
| ``meta`` | ``epoch`` and ``iter``, the config, the seed, the classes, the thresholds; its batches; |
| | ``recipe``: the options and the schedules as the config gives them (:func:`recipe_of`); |
| | of each process ``random_states``, ``temporal_states`` and ``accumulated_gradients`` |
"""

import datetime
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mmengine
import torch
from mmengine.dist import all_gather_object, gather_object, get_rank, get_world_size
from mmengine.hooks import EarlyStoppingHook, EMAHook, Hook, ParamSchedulerHook
from mmengine.runner.checkpoint import weights_to_cpu
from torch import Tensor
from torch.distributed import distributed_c10d

from visdet.errors import listed

from ..config.checks import section_of
from ..errors import CheckpointError
from ..optim.wrappers import unwrapped
from ..process.random_state import current_random_state, preserved_random_state, set_random_state
from .class_names import category_ids_of
from .data_place import batch_size_of, go_on_in_data
from .plain_state import restore_message_hub, to_plain
from .schedules import changes, continue_changed, load_schedules, schedule_states
from .score_thresholds import thresholds_of

# What torch's optimizers remember of each number of a parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
# What mmengine's hook remembers, without a ``state_dict``, and the metric that it is of.
_OF_EARLY_STOPPING = ("monitor", "wait_count", "best_score")
_UNFIT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_PATIENCE = datetime.timedelta(seconds=60)
_calls: Counter[str] = Counter()  # of save_checkpoint in an iteration of a run


def collected_state(
    runner: Any, meta: dict[str, Any], save_optimizer: bool, save_param_scheduler: bool
) -> dict[str, Any]:
    """Return the state of a run in mmengine's layout.

    All processes call this, and the result is complete in the main process alone.

    Args:
        runner: the run.
        meta: what 'meta' holds besides, with the counts 'epoch' and 'iter'.
        save_optimizer, save_param_scheduler: whether the states of the optimizers and of the schedules are in it.
            Without the optimizers, no run can go on from the checkpoint, and only what describes the weights is in it.
    """
    of_processes = _states_of_processes(runner) if save_optimizer else {}
    if get_rank() != 0:
        return {}
    loop = runner.train_loop
    wrapper = runner.optim_wrapper
    loader = loop.dataloader
    dataset = loader.dataset
    state = {
        "meta": {
            **meta,
            "cfg": runner.cfg.pretty_text,
            "seed": runner.seed,
            "experiment_name": runner.experiment_name,
            "time": time.strftime("%Y%m%d_%H%M%S"),
            "mmengine_version": mmengine.__version__,
            "dataset_meta": getattr(dataset, "metainfo", None),
            "category_ids": category_ids_of(dataset),
            "score_thresholds": _own_thresholds(runner, meta["iter"]),
            "iterations_per_epoch": len(loader),
            "batch_size": batch_size_of(loader),
            "processes": runner.world_size,
            "batches_ahead": loop.batches_ahead,
            "optimizers": {"": type(wrapper.optimizer).__name__},
            **of_processes,
        },
        "state_dict": weights_to_cpu(unwrapped(runner.model).state_dict()),
        "message_hub": runner.message_hub.state_dict(),
    }
    if save_optimizer:
        state["optimizer"] = wrapper.state_dict()
        state["meta"]["recipe"] = runner.recipe
        state["hooks"] = {name: memory_of(hook) for name, hook in hooks_with_memory(runner.hooks).items()}
    if save_param_scheduler:
        state["param_schedulers"] = schedule_states(runner.param_schedulers)
    return state


def _own_thresholds(runner: Any, iteration: int) -> dict[str, float]:
    """Return the thresholds of scores of the validation after this iteration, if there has been one."""
    was_validated = runner.message_hub.get_info("validated_at_iter") == iteration
    return thresholds_of(runner.val_loop.evaluator.metrics) if was_validated and runner.val_loop else {}


def _states_of_processes(runner: Any) -> dict[str, Any]:
    """Return what each process alone knows, in the order of the ranks, or nothing if the main process saves alone."""
    if not _all_processes_come(runner):
        runner.logger.warning(
            "a checkpoint is saved by the main process alone, so that it lacks the random states of the others. A run "
            "that is resumed from it differs. Let all processes call save_checkpoint, of which the main one writes"
        )
        return {}
    model = unwrapped(runner.model)
    wrapper = runner.optim_wrapper
    states: dict[str, Any] = {
        "random_states": all_gather_object(current_random_state()),
        "accumulated_gradients": None,
    }
    if hasattr(model, "plain_state"):
        states["temporal_states"] = all_gather_object(model.plain_state(runner.steps.state))
    if not wrapper.should_update():
        # The next update needs gradients of earlier iterations. The main process alone gets those of the others.
        gradients = {name: _gathered(parameter.grad) for name, parameter in model.named_parameters()}
        counts = [wrapper._accumulative_counts]
        states["accumulated_gradients"] = {"accumulative_counts": counts, "by_rank": gradients}
    return states


def _gathered(gradient: Tensor | None) -> list[Tensor | None] | None:
    """Return the gradients of a parameter in all processes, on the CPU."""
    return gather_object(None if gradient is None else gradient.detach().cpu())


def _all_processes_come(runner: Any) -> bool:
    """Return whether all processes come here. A hook may save a checkpoint in the main process only.

    The main process waits a minute for the others, and tells those that come later that it has gone on alone.
    """
    processes = get_world_size()
    own = get_rank()
    if processes == 1:
        return True
    store = distributed_c10d._get_default_store()
    say = store.set
    place = f"{runner.experiment_name} at {runner.iter}"
    _calls[place] += 1
    place += f", checkpoint {_calls[place]}"
    if own == 0:
        ranks = [f"{place} {rank}" for rank in range(1, processes)]
        try:
            store.wait(ranks, _PATIENCE)
            say(place, "together")
        except RuntimeError:
            say(place, "alone")
    else:
        say(f"{place} {own}", "here")
        store.wait([place])
    return store.get(place) == b"together"


def has_memory(hook: Hook) -> bool:
    """Return whether a hook remembers something that a resumed run needs."""
    has_methods = hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict")
    return has_methods or isinstance(hook, EarlyStoppingHook)


def is_kept(hook: Hook) -> bool:
    """Return whether a checkpoint holds what a hook has seen: its memory, an average, or the steps of schedules."""
    return has_memory(hook) or isinstance(hook, EMAHook | ParamSchedulerHook)


def hooks_with_memory(hooks: Sequence[Hook]) -> dict[str, Hook]:
    """Return the hooks that remember something by the names of their classes, with a number from the second on."""
    found: dict[str, Hook] = {}
    counts: Counter[str] = Counter()
    for hook in filter(has_memory, hooks):
        kind = type(hook).__name__
        counts[kind] += 1
        number = counts[kind]
        found[f"{kind} {number}" if number > 1 else kind] = hook
    return found


def memory_of(hook: Any) -> Any:
    """Return what a hook remembers."""
    if hasattr(hook, "state_dict"):
        return hook.state_dict()
    return {name: getattr(hook, name) for name in _OF_EARLY_STOPPING}


def _remember(hook: Any, memory: Any) -> None:
    if hasattr(hook, "load_state_dict"):
        hook.load_state_dict(memory)
        return
    if memory.get("monitor", hook.monitor) != hook.monitor:
        return  # Its best score is that of another metric.
    for name, value in memory.items():
        setattr(hook, name, value)


def restore(runner: Any, path: str, content: dict[str, Any]) -> dict[str, Any] | None:
    """Restore all that a checkpoint holds, and return the random state with which training is to go on.

    The run has its model, data, optimizer and schedules. What the checkpoint lacks, and what the config has changed, is
    said. The result is None if the checkpoint has no random state for this number of processes.

    Args:
        runner: the run.
        path: the checkpoint, for messages.
        content: what the checkpoint holds, without its weights, which the run has loaded.

    Raises:
        CheckpointError: a part does not fit this run. The message names it.
    """
    meta = content["meta"]
    loop = runner.train_loop
    warn = runner.logger.warning
    held = meta.get
    seed = runner.seed
    with _restoring(path, "meta"):
        loop.epoch = int(meta["epoch"])
        loop.iter = int(meta["iter"])
        if min(loop.epoch, loop.iter) < 0:
            raise ValueError("a count is negative")
        go_on_in_data(runner, path, meta)
    with _restoring(path, "message_hub"):
        runner.message_hub.load_state_dict(restore_message_hub(content["message_hub"]))
    if to_plain(held("dataset_meta")) != to_plain(getattr(loop.dataloader.dataset, "metainfo", None)):
        warn(f"{path} comes from a run whose training data have other classes or another metainfo")
    if held("seed") not in (None, seed):
        warn(
            f"{path} comes from a run with the seed {meta['seed']}, but the config has {seed}: the order of the data "
            "is another one from here on"
        )
    _restore_optimizer(runner, path, content)
    _restore_gradients(runner, path, meta)
    model = unwrapped(runner.model)
    is_temporal = hasattr(model, "state_of_plain")
    temporal_states = held("temporal_states") or []
    with _restoring(path, "meta['temporal_states']"):
        if is_temporal and len(temporal_states) == runner.world_size:
            runner.steps.state = model.state_of_plain(temporal_states[runner.rank])
    is_there = {
        "meta['random_states']": held("random_states"),
        "meta['temporal_states']": temporal_states or not is_temporal,
        "param_schedulers": content.get("param_schedulers") or held("recipe") or not runner.param_schedulers,
        **_restored_hooks(runner, path, section_of(content, "hooks")),
    }
    if lacking := [part for part, is_held in is_there.items() if not is_held]:
        warn(
            f"{path} is not complete: it lacks {listed(lacking)}. The run goes on from it otherwise than the run that "
            "wrote it would have"
        )
    return _random_state(runner, path, held("random_states"))


def _restored_hooks(runner: Any, path: str, memories: dict[str, Any]) -> dict[str, bool]:
    """Let the hooks remember what a checkpoint holds of them, and return whether it lacks nothing, by their places."""
    is_there = {}
    for name, hook in hooks_with_memory(runner.hooks).items():
        part = f"hooks[{name!r}]"
        with _restoring(path, part):
            if name in memories:
                _remember(hook, memories[name])
            is_there[part] = name in memories or not memory_of(hook)
    return is_there


def _random_state(runner: Any, path: str, states: Any) -> dict[str, Any] | None:
    """Return the random state of this process, which is tried, or None if there are those of other processes."""
    with _restoring(path, "meta['random_states']"):
        if states is None:
            return None
        before = len(states)
        processes = runner.world_size
        if before == processes:
            own = states[runner.rank]
            with preserved_random_state():
                set_random_state(own)  # a trial
            return own
        runner.logger.warning(
            f"{path} comes from a run with {before} processes, but this run has {processes}. Its data order and random "
            "numbers differ from those of the earlier run"
        )
    return None


def _restore_optimizer(runner: Any, path: str, content: dict[str, Any]) -> None:
    """Load the states of the optimizers and of the schedules, or let those go on that the config has changed.

    The optimizers must be of the same classes and for the same parameters. torch does not compare shapes: a fused
    optimizer would read and write beyond the memory of a smaller tensor.
    """
    meta = content["meta"]
    wrapper = runner.optim_wrapper
    loop = runner.train_loop
    optimizer = wrapper.optimizer
    schedules = runner.param_schedulers
    now_recipe = runner.recipe
    warn = runner.logger.warning
    now = type(optimizer).__name__
    own = {"": now}
    before = meta.get("optimizers") or own
    if before != own:
        raise CheckpointError(
            refusal(path, f"it has the state of {listed(before.values())}, but the config has {now}")
        )
    with _restoring(path, "optimizer"):
        wrapper.load_state_dict(content["optimizer"])
        _check_moments(optimizer)
    with _restoring(path, "param_schedulers"):
        saved = content.get("param_schedulers")
        recipe = meta.get("recipe")
        done = loop.iter
        is_changed = recipe is not None and (recipe != now_recipe or not saved)
        load_schedules(schedules, saved, is_trial=is_changed)
        if recipe is None:
            warn(
                f"{path} does not say which config its learning rates and schedules come from. They go on as they are "
                "in it, whatever this config says"
            )
        if not is_changed:
            return
        if changed := changes(recipe, now_recipe):
            warn(
                f"the config differs from that of {path} in {changed}. The learning rates and the schedules are those "
                f"of this config, as after {done} of its {loop.max_iters} iterations"
            )
        counts = (done, loop.epoch, len(loop.dataloader) if loop.by_epoch else None)
        continue_changed(optimizer, schedules, recipe, now_recipe, saved, counts)


def _check_moments(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter, {})
            for key in set(_MOMENTS).intersection(state):
                moment = state[key]
                expected = tuple(parameter.shape)
                shape = tuple(getattr(moment, "shape", ()))
                if moment is not None and shape != expected:
                    raise ValueError(f"{key} of parameter {position} has the shape {shape}, not {expected}")


def _restore_gradients(runner: Any, path: str, meta: dict[str, Any]) -> None:
    """Restore the gradients that have been accumulated since the last update, or say that they are lost."""
    count = runner.optim_wrapper._accumulative_counts
    is_between_updates = int(meta["iter"]) % count
    saved = meta.get("accumulated_gradients", {} if is_between_updates else None)
    if saved is None:
        return
    with _restoring(path, "meta['accumulated_gradients']"):
        by_rank = saved.get("by_rank", {})
        processes = runner.world_size
        fits = saved.get("accumulative_counts") == [count]
        if fits and all(len(gradients) == processes for gradients in by_rank.values()):
            for name, parameter in unwrapped(runner.model).named_parameters():
                gradient = by_rank[name][runner.rank]
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            return
    runner.logger.warning(
        f"{path} was saved between two updates, and the gradients that were accumulated since the first are lost: "
        "it holds none for this accumulative_counts and number of processes"
    )


@contextmanager
def _restoring(path: str, part: str) -> Iterator[None]:
    """Turn an error in restoring a part of a checkpoint into a CheckpointError that names the part."""
    try:
        yield
    except _UNFIT as error:
        reason = f"its {part} cannot be restored ({type(error).__name__}: {str(error)[:200]})"
        raise CheckpointError(refusal(path, reason)) from error


def refusal(path: str, reason: str) -> str:
    """Return the message that a checkpoint cannot be resumed, and what can be done with it."""
    return (
        f"checkpoint {path} cannot be resumed: {reason}. To start training from its weights, drop --resume and use "
        f"--from {path}"
    )
