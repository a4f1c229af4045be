"""Checks of the sections of a config, which need no class of a model or a data set."""

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from visdet.errors import ConfigError

_LOADERS = tuple(f"{stage}_dataloader" for stage in ("train", "val", "test"))
# The sections that must be dicts, lists of dicts, or one of both, with a ``type`` in each dict if they are "typed".
_SHAPES = {
    "model": "typed dict",
    "optim_wrapper": "dict",
    "optim_wrapper.optimizer": "typed dict",
    "optim_wrapper.clip_grad": "dict",
    "optim_wrapper.paramwise_cfg": "dict",
    "default_hooks": "dict",
    "default_hooks.*": "typed dict",
    "custom_hooks": "typed list",
    "param_scheduler": "dict or list",
    "val_evaluator": "typed dict or list",
    "test_evaluator": "typed dict or list",
    "visualizer": "dict",
    "visualizer.vis_backends": "typed list",
    "env_cfg.*_cfg": "dict",
    **dict.fromkeys(_LOADERS, "dict"),
    **{
        f"{loader}.{part}": "typed dict"
        for loader in _LOADERS
        for part in ("dataset", "sampler", "batch_sampler")
    },
    **{f"{loader}.dataset.pipeline": "typed list" for loader in _LOADERS},
    **dict.fromkeys(
        ("train_cfg", "val_cfg", "test_cfg", "auto_scale_lr", "data_preprocessor", "env_cfg"), "dict"
    ),
    **dict.fromkeys(("log_processor", "randomness", "model_wrapper_cfg"), "dict"),
}
_NEVER_NONE = ("env_cfg", "randomness")
_LEAST = {
    "train_cfg.max_iters": 0,
    "train_cfg.max_epochs": 0,
    "train_cfg.val_interval": 1,
    "train_cfg.val_begin": 0,
    "*_dataloader.batch_size": 1,
    "*_dataloader.num_workers": 0,
    "*_dataloader.prefetch_factor": 1,
    "optim_wrapper.accumulative_counts": 1,
    "auto_scale_lr.base_batch_size": 1,
    "default_hooks.logger.interval": 1,
    "default_hooks.checkpoint.interval": -1,
    "default_hooks.checkpoint.max_keep_ckpts": -1,
    "log_processor.window_size": 1,
    "log_processor.num_digits": 0,
    "randomness.seed": 0,
}
_MOST = {
    "train_cfg.max_iters": 2**31 - 1,
    "train_cfg.max_epochs": 2**31 - 1,
    "*_dataloader.batch_size": 2**20,
    "*_dataloader.num_workers": 512,
    "*_dataloader.prefetch_factor": 1024,
    "randomness.seed": 2**32 - 1,
}
_OF_NORM = {"error_if_nonfinite", "foreach", "norm_type"}
_MAY_BE_NONE = ("*_dataloader.prefetch_factor", "randomness.seed")
_FLAGS = (
    *("allow_nonfinite_weights", "find_unused_parameters", "graph", "strict_load", "trust_checkpoint"),
    *("env_cfg.cudnn_benchmark", "randomness.deterministic", "randomness.diff_rank_seed"),
)
_OF_RANDOMNESS = {"deterministic", "diff_rank_seed", "seed"}


def check_sections(cfg: Any) -> None:
    """Check that each section of a config is a dict or a list, as it must be, and that counts are whole numbers.

    Raises:
        ConfigError: one is not. The message names its path, what is expected and what was given.
    """
    for pattern, shape in _SHAPES.items():
        for path, value in _found(cfg, pattern):
            _check_shape(path, value, shape)
    for pattern, least in _LEAST.items():
        for path, value in _found(cfg, pattern):
            # The loops make whole numbers of 1e4 and the like.
            kinds = int if "dataloader" in path else int | float
            is_count = (
                isinstance(value, kinds) and not isinstance(value, bool) and value % 1 == 0 and value >= least
            )
            if not is_count and not (value is None and pattern in _MAY_BE_NONE):
                raise ConfigError(f"{path} must be a whole number, {least} or more, got {value!r}")
            if value is not None and pattern in _MOST and value > _MOST[pattern]:
                raise ConfigError(f"{path} must be {_MOST[pattern]} or less, got {value!r}")
    for _, clip in _found(cfg, "optim_wrapper.clip_grad"):
        _check_clip_grad(clip)
    for _, given in _found(cfg, "train_cfg.dynamic_intervals"):
        if not (given is None or (isinstance(given, list) and all(map(_is_interval, given)))):
            raise ConfigError(
                "train_cfg.dynamic_intervals must be a list of tuples (begin, interval) of whole numbers from 0 and "
                f"from 1 on, got {given!r}"
            )
    for schedule in schedules_of(cfg.get("param_scheduler")):
        for name in ("step_size", "start_factor"):
            value = schedule.get(name)
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise ConfigError(
                    f"param_scheduler: {name} of {schedule.get('type')} must be positive, got {value!r}"
                )
    if not isinstance(cfg.get("compile"), bool | dict | None):
        raise ConfigError(f"compile must be True, False or a dict, got {cfg['compile']!r}")
    for key in ("activation_checkpointing", "efficient_conv_bn_eval"):
        names = cfg.get(key)
        if not isinstance(names, str | list | None) or not all(isinstance(name, str) for name in names or ()):
            raise ConfigError(f"{key} must be a list of names of parts of the model, got {names!r}")
    for pattern in _FLAGS:
        for path, flag in _found(cfg, pattern):
            if not isinstance(flag, bool | None):
                raise ConfigError(f"{path} must be True or False, got {flag!r}")
    if unknown := set(cfg.get("randomness") or {}) - _OF_RANDOMNESS:
        raise ConfigError(
            f"randomness: unknown key {min(unknown)!r}; it may have {', '.join(sorted(_OF_RANDOMNESS))}"
        )


def _check_clip_grad(clip: Any) -> None:
    """Check the keywords of gradient clipping, which mmengine passes to torch at the first iteration."""
    if not clip or not isinstance(clip, dict):
        return
    norm = dict(clip)
    by_value = norm.pop("type", "norm") == "value"
    name, known = ("clip_value", {"foreach"}) if by_value else ("max_norm", _OF_NORM)
    limit = norm.pop(name, None)
    if unknown := set(norm) - known:
        raise ConfigError(
            f"optim_wrapper.clip_grad: unknown key {min(unknown)!r}; beside type and {name} it may have "
            f"{', '.join(sorted(known))}"
        )
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not limit > 0:
        raise ConfigError(f"optim_wrapper.clip_grad.{name} must be a positive number, got {limit!r}")


def _is_interval(pair: Any) -> bool:
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    return is_pair and all(isinstance(number, int) for number in pair) and pair[0] >= 0 and pair[1] >= 1


def check_types(cfg: Any) -> None:
    """Check that each part of a config that a class is built from names the class.

    Raises:
        ConfigError: one does not.
    """
    for pattern, shape in _SHAPES.items():
        for path, value in _found(cfg, pattern) if "typed" in shape else ():
            for part in value if isinstance(value, list | tuple) else [value]:
                if isinstance(part, dict) and _is_no_class(kind := part.get("type")):
                    raise ConfigError(f"{path}.type must be the name of a class, got {kind!r}")
    for schedule in schedules_of(cfg.get("param_scheduler")):
        if _is_no_class(schedule.get("type")):
            raise ConfigError(f"param_scheduler: each schedule must have a type, got {schedule!r}")


def check_parts(cfg: Any) -> None:
    """Check that a complete config has the parts that a run is built from.

    Raises:
        ConfigError: a part names no class, or a loader has no data set or no sampler.
    """
    check_types(cfg)
    for loader in _LOADERS:
        for part in ("dataset", "sampler"):
            given = cfg.get(loader)
            is_replaced = part == "sampler" and isinstance(given, dict) and given.get("batch_sampler")
            if isinstance(given, dict) and given.get(part) is None and not is_replaced:
                raise ConfigError(f"{loader}.{part} is missing")


def _is_no_class(kind: Any) -> bool:
    return kind is None or isinstance(kind, int | float | list | tuple | dict)


def _found(cfg: Any, pattern: str) -> Iterator[tuple[str, Any]]:
    """Yield the paths of a config that fit a pattern of one or more keys, and their values."""
    first, _, rest = pattern.partition(".")
    for key in list(cfg):
        if fnmatchcase(str(key), first):
            if not rest:
                yield key, cfg[key]
            elif isinstance(cfg[key], dict):
                for path, value in _found(cfg[key], rest):
                    yield f"{key}.{path}", value


def _check_shape(path: str, value: Any, shape: str) -> None:
    if value is None and path not in _NEVER_NONE:
        return
    kinds = {"dict": dict, "list": list | tuple}
    if isinstance(value, list | tuple) and "list" in shape:
        for number, item in enumerate(value):
            _check_shape(f"{path}.{number}", item, "typed dict")
        return
    # An object, such as a model that a program has built, is fine.
    is_plain = value is None or isinstance(value, str | bytes | int | float | list | tuple)
    if is_plain or (isinstance(value, dict) and "dict" not in shape):
        expected = " or ".join(f"a {kind}" for kind in kinds if kind in shape)
        raise ConfigError(f"{path} must be {expected}, got {value!r}")


def check_counting(cfg: Any) -> None:
    """Check that schedules and checkpoints do not count epochs where training counts iterations and has no epochs.

    Raises:
        ConfigError: one does, so that it would never act.
    """
    train_cfg = cfg.get("train_cfg")
    if (
        not train_cfg
        or not is_iteration_based(train_cfg)
        or train_cfg.get("type") not in (None, "IterBasedTrainLoop")
    ):
        return
    schedules = schedules_of(cfg.get("param_scheduler"))
    # A plateau is looked for after each validation.
    parts = [
        ("param_scheduler", part) for part in schedules if "ReduceOnPlateau" not in str(part.get("type"))
    ]
    checkpoint = (cfg.get("default_hooks") or {}).get("checkpoint") or {"by_epoch": False}
    for name, part in [*parts, ("default_hooks.checkpoint", checkpoint)]:
        if part.get("type") and part.get("by_epoch", True) is True and not part.get("convert_to_iter_based"):
            raise ConfigError(
                f"{name} ({part.get('type')}) counts epochs, but train_cfg counts iterations, so that it would never "
                "act. Give it by_epoch=False and its numbers in iterations"
            )


def is_iteration_based(train_cfg: dict) -> bool:
    """Return whether a ``train_cfg`` counts iterations rather than epochs."""
    return "max_iters" in train_cfg or train_cfg.get("by_epoch") is False


def schedules_of(scheduler: Any) -> Iterator[dict]:
    """Yield the configs of schedules, which are given as one, as a list, or as lists by the names of optimizers."""
    if isinstance(scheduler, dict) and "type" not in scheduler:
        for of_optimizer in scheduler.values():
            yield from schedules_of(of_optimizer)
    else:
        several = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        yield from (one for one in several if isinstance(one, dict))
