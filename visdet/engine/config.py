"""Configs: read with clear errors, completed with what follows from the rest, checked before anything is built."""

import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.runner import Runner

from visdet.command_line import CfgOptions

from .errors import ConfigError, UserError, nearest_names
from .foreign_scope import adopt_mmdet_scope

__all__ = [
    "CfgOptions",
    "check_required_keys",
    "check_work_dir",
    "complete_config",
    "dataset_config",
    "load_config",
]

# What mmengine's Runner reads from a config beside its own arguments, and what this package adds.
_OTHER_KEYS = {
    "activation_checkpointing",
    "compile",
    "custom_imports",
    "efficient_conv_bn_eval",
    "find_unused_parameters",
    "graph",
    "model_wrapper_cfg",
    "runner_type",
    "strict_load",
    "sync_bn",
    "trust_checkpoint",
}
_RUNNER_KEYS = {name for name in inspect.signature(Runner.__init__).parameters if name not in ("self", "cfg")}
_KNOWN_KEYS = _RUNNER_KEYS | _OTHER_KEYS
_TRAINING_KEYS = ("model", "train_dataloader", "train_cfg", "optim_wrapper")
_TEST_KEYS = ("model", "test_dataloader", "test_cfg", "test_evaluator")


def load_config(
    path: str, options: dict[str, Any] | None = None, work_dir: str | None = None
) -> tuple[Config, list[str]]:
    """Return the config at ``path`` with ``options`` merged in, and remarks for the terminal.

    Args:
        options: dotted keys and values of ``--cfg-options``.
        work_dir: where the run writes; default: the config's, else ``work_dirs/<name of the config>``.

    Raises:
        ConfigError: no such file, or one that does not run; a top-level key or an option that nothing reads.
    """
    cfg = _read(path)
    known_before = set(cfg)
    if options:
        try:
            cfg.merge_from_dict(options)
        except (KeyError, TypeError, IndexError) as error:
            given = " ".join(f"{key}={value}" for key, value in options.items())
            raise ConfigError(f"--cfg-options {given} does not fit {path}: {error}") from error
    _check_top_level_keys(cfg, path)
    remarks = _check_options(options or {}, known_before, path)
    cfg.work_dir = work_dir or cfg.get("work_dir") or os.path.join("work_dirs", Path(path).stem)
    return cfg, remarks + adopt_mmdet_scope(cfg)


def _read(path: str) -> Config:
    if not os.path.isfile(path):
        folder = next((parent for parent in Path(path).parents if parent.is_dir()), Path("."))
        raise ConfigError(f"config {path} does not exist{_did_you_mean(_named_like(path, folder))}")
    try:
        return Config.fromfile(path)
    except ModuleNotFoundError as error:
        if error.name == "pkg_resources":
            raise ConfigError(
                f"config {path}: a base written `package::path` needs pkg_resources, which setuptools no longer has; "
                "write the base as a relative path"
            ) from error
        raise ConfigError(f"config {path} imports a module that is not there: {error}") from error
    except FileNotFoundError as error:
        if not str(error.filename).endswith(".py"):
            raise ConfigError(f"config {path} cannot be read: {error}") from error
        folder = Path(path).parent
        near = [os.path.relpath(file, folder) for file in _named_like(error.filename, folder)]
        raise ConfigError(
            f"config {path}: there is no base {error.filename}. A path in _base_ is relative to the folder of the file "
            f"that it stands in{_did_you_mean(near)}"
        ) from error
    except Exception as error:  # a config is a program: whatever it raises is its author's to read
        raise ConfigError(f"config {path} cannot be read: {type(error).__name__}: {error}") from error


def _named_like(path: str, folder: Path) -> list[str]:
    """Return the Python files in and below ``folder`` whose names are like that of ``path``."""
    files = {str(file): file.name for file in folder.rglob("*.py") if "site-packages" not in file.parts}
    near = nearest_names(Path(path).name, files.values())
    return [file for name in near for file, its_name in files.items() if its_name == name]


def _did_you_mean(candidates: list[str]) -> str:
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


def _check_top_level_keys(cfg: Config, path: str) -> None:
    """Refuse a top-level key that is nearly, but not quite, one that the runner reads.

    Configs are programs, and any other key may be a helper variable of theirs.

    Raises:
        ConfigError: names the key and what was probably meant.
    """
    for key in cfg:
        if key not in _KNOWN_KEYS and (near := nearest_names(key, _KNOWN_KEYS, cutoff=0.86, count=1)):
            raise ConfigError(f"config {path}: unknown key {key!r}; did you mean {near[0]!r}?")


def _check_options(options: dict[str, Any], known_before: set[str], path: str) -> list[str]:
    """Refuse options whose first word means nothing; remark on those that only change a helper variable."""
    remarks = []
    for option in options:
        key = option.split(".")[0]
        if key in _KNOWN_KEYS:
            continue
        if key not in known_before:
            near = nearest_names(key, _KNOWN_KEYS | known_before)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ConfigError(f"--cfg-options {option}: unknown key {key!r}{hint}")
        remarks.append(
            f"--cfg-options {option} changes a helper variable of {path}; where the config has used it, the old value "
            "stays. Set the keys that use it instead."
        )
    return remarks


def complete_config(cfg: Config) -> None:
    """Fill in what follows from the rest of a config, in place, where the config does not say it.

    Hooks and log lines count iterations where the training loop does; an iteration-based run saves a
    checkpoint whenever it validates; workers of a loader that has none do not persist; a schedule may begin
    after a run that was cut short.
    """
    if cfg.get("default_scope") is None:
        cfg.default_scope = "visdet"
    for part in ("train", "val", "test"):
        loader = cfg.get(f"{part}_dataloader")
        if isinstance(loader, dict) and loader.get("num_workers", 0) == 0:
            loader["persistent_workers"] = False
    hooks = _section(cfg, "default_hooks")
    train_cfg = cfg.get("train_cfg")
    if not train_cfg:
        return
    by_epoch = not _is_iteration_based(train_cfg)
    length = train_cfg.get("max_epochs" if by_epoch else "max_iters")
    if hooks.get("checkpoint", {}) is not None:
        checkpoint = _section(hooks, "checkpoint")
        checkpoint.setdefault("type", "CheckpointHook")
        checkpoint.setdefault("by_epoch", by_epoch)
        checkpoint.setdefault(
            "interval", 1 if checkpoint["by_epoch"] else train_cfg.get("val_interval", 1000)
        )
    if hooks.get("logger", {}) is not None:
        logger = _section(hooks, "logger")
        logger.setdefault("type", "LoggerHook")
        logger.setdefault("log_metric_by_epoch", by_epoch)
    _section(cfg, "log_processor").setdefault("by_epoch", by_epoch)
    schedules = cfg.get("param_scheduler") or []
    for schedule in [schedules] if isinstance(schedules, dict) else schedules:
        # mmengine ends an open schedule with training, and refuses one that would end before it begins.
        if isinstance(schedule, dict) and schedule.get("by_epoch", True) == by_epoch:
            begin = schedule.get("begin", 0)
            if length is not None and begin >= length:
                schedule.setdefault("end", begin + 1)


def _is_iteration_based(train_cfg: dict) -> bool:
    """Return whether a ``train_cfg`` counts iterations rather than epochs."""
    return "max_iters" in train_cfg or train_cfg.get("by_epoch") is False


def _section(parent: Any, key: str) -> Any:
    """Return the dict under ``key``, put there where there is none."""
    if parent.get(key) is None:
        parent[key] = {}
    return parent[key]


def check_required_keys(cfg: Config, for_training: bool) -> None:
    """Raise a ConfigError that names what is missing of the parts that training, or testing, needs."""
    if for_training and "data" in cfg and "train_dataloader" not in cfg:
        raise ConfigError(
            "this is a config of mmdetection 2 (`data`, `runner`); convert it to version 3's keys first"
        )
    missing = [key for key in (_TRAINING_KEYS if for_training else _TEST_KEYS) if cfg.get(key) is None]
    if missing:
        raise ConfigError(f"config {cfg.filename} lacks {', '.join(missing)}")


def dataset_config(cfg: Config, split: str) -> dict:
    """Return the config of the data set of a split, 'train', 'val' or 'test'.

    Raises:
        ConfigError: the config has no loader for the split, or the loader has no data set.
    """
    dataset = (cfg.get(f"{split}_dataloader") or {}).get("dataset")
    if dataset is None:
        raise ConfigError(f"config {cfg.filename} has no {split}_dataloader.dataset")
    return dataset


def check_work_dir(work_dir: str, option: str = "--work-dir") -> None:
    """Create ``work_dir`` and write a file in it, to learn now rather than at the first checkpoint that one cannot.

    Args:
        work_dir: the folder.
        option: of the command line, that chooses another one.

    Raises:
        UserError: names the folder and the reason.
    """
    try:
        os.makedirs(work_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=work_dir) as file:
            file.write(b"\0")
    except OSError as error:
        raise UserError(
            f"folder {work_dir} cannot be written: {error.strerror or error}; choose another one with {option}"
        ) from error
