"""Reading, completing and checking configs before anything is built from them."""

import os
import warnings
from collections.abc import Iterator
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.registry import init_default_scope

from visdet.errors import InvalidTypeError, add_hint
from visdet.registry import DATASETS

from ..errors import ConfigError, nearest_names
from .checks import SECTIONS, check_counting, check_sections, is_iteration_based, section_of, several_of
from .files import read_config
from .foreign_scope import adopt_mmdet_scope
from .other_names import NAMES_OF_TRAINING
from .packaged import did_you_mean

__all__ = [
    "build_dataset",
    "check_required_keys",
    "complete_config",
    "dataset_config",
    "datasets_within",
    "given_dataset",
    "load_config",
]

_TRAINING_KEYS = ("model", "train_dataloader", "train_cfg", "optim_wrapper")
_STAGES = {"val": "validation", "test": "testing"}
_TEST_KEYS = ("model", "test_dataloader", "test_cfg", "test_evaluator")


def load_config(
    config: str | os.PathLike | Config, options: dict[str, Any] | None = None, work_dir: str | None = None
) -> tuple[Config, list[str]]:
    """Return a config with ``options`` merged in, and remarks for the terminal.

    Args:
        config: the config file, the name of one of the package's configs, or a config, which is not changed.
        options: the dotted keys and the values of ``--cfg-options``.
        work_dir: the folder that the run writes to. By default it is the config's ``work_dir``, or
            ``work_dirs/<name of the config>`` if the config has none.

    Raises:
        ConfigError: the file does not exist or cannot be read; ``custom_imports`` names a module that is not there; a
            top-level key looks like a misspelt key of the runner; or an option does not fit the config or begins with
            an unknown key.
        Exception: any error of a module of the user that the config imports.
    """
    if isinstance(config, Config):
        cfg = deepcopy(config)
    elif isinstance(config, str | os.PathLike):
        cfg = read_config(os.fspath(config))
    else:
        raise InvalidTypeError(f"config must be a path, a name or a Config, got {type(config).__name__}")
    path = cfg.filename or "config"
    known_before = set(cfg)
    given = options or {}
    for option, value in given.items():
        if option.partition(".")[0] == "vis_backends" and isinstance(cfg.get("visualizer"), dict):
            _set_option(cfg, f"visualizer.{option}", value)
        _set_option(cfg, option, value)
    remarks = _check_options(given, known_before, path)
    for key in cfg:  # Any other unknown key may be a helper variable of the config, which is a program.
        if key not in SECTIONS and (near := nearest_names(key, SECTIONS, cutoff=0.86, count=1)):
            raise ConfigError(f"config {path}: unknown key {key!r}; did you mean {near[0]!r}?")
    check_sections(cfg)
    _import_custom_modules(cfg, path)
    cfg.work_dir = work_dir or cfg.get("work_dir") or f"work_dirs/{Path(path).stem}"
    return cfg, remarks + adopt_mmdet_scope(cfg)


def _set_option(cfg: Config, option: str, value: Any) -> None:
    """Set the value at a dotted path. A dict is merged into the dict that is there, unless it has ``_delete_``.

    Raises:
        ConfigError: the path leads through a value that is neither a dict nor a list, or to no item of a list.
    """
    node: Any = cfg._cfg_dict
    *parents, last = option.split(".")
    own = ConfigDict(value=deepcopy(value))["value"]
    try:
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, ConfigDict())
        place: Any = last
        if isinstance(node, list):
            place = int(last)
            before = node[place]
        else:
            before = node.get(last)
        if isinstance(before, ConfigDict) and isinstance(own, dict):
            before.merge(own)
        else:
            node[place] = own
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"--cfg-options {option}={value}: the config has no such place: {error}") from error


def _import_custom_modules(cfg: Config, path: str) -> None:
    """Import the modules that ``custom_imports`` of a config names.

    Raises:
        ConfigError: there is no such module.
    """
    custom = section_of(cfg, "custom_imports")
    for module in several_of(custom, "imports"):
        try:
            import_module(module)
        except Exception as error:
            if isinstance(error, ImportError) and custom.get("allow_failed_imports"):
                warnings.warn(f"{path}: custom_imports: {module} cannot be imported: {error}", stacklevel=2)
                continue
            if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"config {path}: there is no module {error.name}, which custom_imports names. Python looks for it "
                    "among the installed packages and in the folders that the environment variable PYTHONPATH names"
                ) from error
            add_hint(error, f"in the config: custom_imports of {path}")
            raise


def _check_options(options: dict[str, Any], known_before: set[str], path: str) -> list[str]:
    """Refuse options that begin with an unknown key, and return remarks on those that change a helper variable."""
    remarks = []
    for option in options:
        key = option.partition(".")[0]
        if key in SECTIONS or key == "vis_backends":
            continue
        if key not in known_before:
            near = map(repr, nearest_names(key, SECTIONS.keys() | known_before))
            other = NAMES_OF_TRAINING.get(key)
            hint = f"; write {other}" if other else did_you_mean(list(near))
            raise ConfigError(f"--cfg-options {option}: unknown key {key!r}{hint}")
        remarks.append(
            f"--cfg-options {option} changes a helper variable of {path}. Keys that the config has computed from it "
            "keep the old value. Set those keys instead."
        )
    return remarks


def complete_config(cfg: Config) -> None:
    """Fill in, in place, the values of a config that follow from its other values.

    * The default scope is 'visdet'.
    * Hooks and the log count iterations if the training loop does.
    * An iteration-based run saves a checkpoint whenever it validates, and an epoch-based run after every epoch.
    * A loader without workers has ``persistent_workers=False`` and no ``timeout``, which torch requires.

    Except for those of a loader without workers, a value that the config gives stays.

    Raises:
        ConfigError: see :func:`check_sections` and :func:`check_counting`.
    """
    value_of = cfg.get
    check_sections(cfg)
    if value_of("default_scope") is None:
        cfg.default_scope = "visdet"
    for part in ("train", "val", "test"):
        loader = value_of(f"{part}_dataloader")
        if isinstance(loader, dict) and loader.get("num_workers", 0) == 0:
            loader["persistent_workers"] = False
            if "timeout" in loader:
                loader["timeout"] = 0
    train_cfg = value_of("train_cfg")
    if not train_cfg:
        return
    by_epoch = not is_iteration_based(train_cfg)
    hooks = section_of(cfg, "default_hooks")
    saves_by_epoch = section_of(hooks, "checkpoint").get("by_epoch", by_epoch)
    interval = 1 if saves_by_epoch else train_cfg.get("val_interval", 1000)
    defaults = {
        "checkpoint": {"type": "CheckpointHook", "by_epoch": by_epoch, "interval": interval},
        "logger": {"type": "LoggerHook", "log_metric_by_epoch": by_epoch},
    }
    for key, of_hook in defaults.items():
        given = hooks.get(key, {})
        hooks[key] = None if given is None else {**of_hook, **given}
    cfg.default_hooks = hooks
    cfg.log_processor = {"by_epoch": by_epoch, **section_of(cfg, "log_processor")}
    check_counting(cfg)


def check_required_keys(cfg: Config, for_training: bool) -> None:
    """Check that a config has all parts that training or testing needs.

    Raises:
        ConfigError: parts are missing, which the message names; only some of the keys of validation or of testing are
            None.
    """
    path = cfg.filename
    value_of = cfg.get
    missing = [key for key in (_TRAINING_KEYS if for_training else _TEST_KEYS) if value_of(key) is None]
    if missing:
        raise ConfigError(f"config {path} lacks {', '.join(missing)}")
    for part, stage in _STAGES.items():
        keys = [f"{part}_dataloader", f"{part}_cfg", f"{part}_evaluator"]
        none = [key for key in keys if value_of(key) is None]
        count = len(none)
        if 0 < count < len(keys):
            raise ConfigError(
                f"config {path}: {' and '.join(none)} {'is' if count == 1 else 'are'} None. To leave out {stage}, set "
                f"all of {', '.join(keys)} to None"
            )


def given_dataset(cfg: Any, split: str) -> dict:
    """Return what a config says of the data set of a split, which may be nothing.

    Of several that a wrapper such as ConcatDataset has, it is the first.
    """
    return next(datasets_within(section_of(section_of(cfg, f"{split}_dataloader"), "dataset")))


def datasets_within(config: dict) -> Iterator[dict]:
    """Yield the configs of the data sets in a wrapper of mmengine's, or the config itself if it is of none."""
    given = [*several_of(config, "datasets"), *several_of(config, "dataset")]
    # A wrapper has no pipeline. What has one may mean something else by these names.
    parts = [part for part in given if isinstance(part, dict) and not config.get("pipeline")]
    if not parts:
        yield config
    for part in parts:
        yield from datasets_within(part)


def dataset_config(cfg: Config, split: str) -> dict:
    """Return the config of the data set of a split, or of the first one that a wrapper of data sets has.

    Args:
        cfg: the whole config.
        split: 'train', 'val' or 'test'.

    Raises:
        ConfigError: the config has no loader for the split, or the loader has no data set.
    """
    dataset = given_dataset(cfg, split)
    if not dataset:
        raise ConfigError(f"config {cfg.filename} has no {split}_dataloader.dataset")
    return dataset


def build_dataset(cfg: Config, split: str, **changes: Any) -> Any:
    """Return the data set of a split, with changes to its config, built under the config's scope.

    Raises:
        ConfigError: see :func:`dataset_config`.
    """
    init_default_scope(cfg.get("default_scope") or "visdet")
    dataset_config(cfg, split)
    return DATASETS.build({**cfg[f"{split}_dataloader"].dataset, **changes})
