"""Reading, completing and checking configs before anything is built from them."""

import importlib
import os
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import mmengine
from mmengine.config import Config

from visdet.command_line import CfgOptions
from visdet.errors import add_hint

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

# The arguments of mmengine's Runner, which takes seconds to import.
_RUNNER_KEYS = {
    "model",
    "work_dir",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "train_cfg",
    "val_cfg",
    "test_cfg",
    "auto_scale_lr",
    "optim_wrapper",
    "param_scheduler",
    "val_evaluator",
    "test_evaluator",
    "default_hooks",
    "custom_hooks",
    "data_preprocessor",
    "load_from",
    "resume",
    "launcher",
    "env_cfg",
    "log_processor",
    "log_level",
    "visualizer",
    "default_scope",
    "randomness",
    "experiment_name",
}
# These keys are not arguments of mmengine's Runner. It reads some of them from the config, and this package the others.
_OTHER_KEYS = {
    "activation_checkpointing",
    "allow_nonfinite_weights",
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
_KNOWN_KEYS = _RUNNER_KEYS | _OTHER_KEYS
_TRAINING_KEYS = ("model", "train_dataloader", "train_cfg", "optim_wrapper")
_CUSTOM_IMPORTS = {"imports", "allow_failed_imports"}
_STAGES = {"val": "validation", "test": "testing"}
_TEST_KEYS = ("model", "test_dataloader", "test_cfg", "test_evaluator")


def load_config(
    path: str, options: dict[str, Any] | None = None, work_dir: str | None = None
) -> tuple[Config, list[str]]:
    """Return the config at ``path`` with ``options`` merged in, and remarks for the terminal.

    Args:
        path: the config file.
        options: the dotted keys and the values of ``--cfg-options``.
        work_dir: the folder that the run writes to. By default it is the config's ``work_dir``, or
            ``work_dirs/<name of the config>`` if the config has none.

    Raises:
        ConfigError: the file does not exist or cannot be read; ``custom_imports`` names a module that is not there; a
            top-level key looks like a misspelt key of the runner; or an option does not fit the config or begins with
            an unknown key.
        Exception: any error of a module of the user that the config imports.
    """
    cfg = _read(path)
    known_before = set(cfg)
    if options:
        try:
            cfg.merge_from_dict(options)
        except (KeyError, TypeError, IndexError) as error:
            given = " ".join(f"{key}={value}" for key, value in options.items())
            raise ConfigError(f"--cfg-options {given} does not fit {path}: {error}") from error
    remarks = _check_options(options or {}, known_before, path)
    _check_top_level_keys(cfg, path)
    cfg.work_dir = work_dir or cfg.get("work_dir") or os.path.join("work_dirs", Path(path).stem)
    return cfg, remarks + adopt_mmdet_scope(cfg)


def _read(path: str) -> Config:
    if not os.path.isfile(path):
        folder = next((parent for parent in Path(path).parents if parent.is_dir()), Path("."))
        raise ConfigError(f"config {path} does not exist{_did_you_mean(_named_like(path, folder))}")
    try:
        cfg = Config.fromfile(path, import_custom_modules=False)
    except FileNotFoundError as error:
        if not str(error.filename).endswith(".py"):
            raise ConfigError(f"config {path} cannot be read: {error}") from error
        folder = Path(path).parent
        near = [os.path.relpath(file, folder) for file in _named_like(error.filename, folder)]
        raise ConfigError(
            f"config {path}: there is no base {error.filename}. A path in _base_ is relative to the folder of the file "
            f"that it stands in{_did_you_mean(near)}"
        ) from error
    except SyntaxError as error:
        # mmengine parses a copy of the file, so that the error may not name the file.
        line = f" (line {error.lineno} of the config or of one of its bases: {(error.text or '').strip()})"
        raise ConfigError(f"config {path} cannot be read: SyntaxError: {error.msg}{line}") from error
    except Exception as error:  # A config is a program and may raise any error.
        is_of_config, place = _place_in_config(error)
        if not is_of_config:
            add_hint(error, f"while reading the config {path}")
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == "pkg_resources":
            raise ConfigError(
                f"config {path}: a base written `package::path` needs pkg_resources, which setuptools no longer has; "
                "write the base as a relative path"
            ) from error
        raise ConfigError(f"config {path} cannot be read: {type(error).__name__}: {error}{place}") from error
    _import_custom_modules(cfg, path)
    return cfg


def _place_in_config(error: Exception) -> tuple[bool, str]:
    """Return whether a config file or mmengine raised an error, and the file and the line if it was a config file.

    Any other error comes from code that a config has called, such as a module of the user.
    """
    frames = traceback.extract_tb(error.__traceback__)
    mmengine_folder = os.path.dirname(mmengine.__file__)
    from_mmengine = [
        place for place, frame in enumerate(frames) if frame.filename.startswith(mmengine_folder)
    ]
    below = frames[from_mmengine[-1] + 1 :] if from_mmengine else []
    if not below or below[0].name != "<module>":
        return True, ""
    last = below[-1]
    return last.filename == below[0].filename, f" ({os.path.relpath(last.filename)}, line {last.lineno})"


def _import_custom_modules(cfg: Config, path: str) -> None:
    """Import the modules that ``custom_imports`` of a config names.

    ``Config.fromfile`` would hide where a module fails, and the name of a package that it lacks.

    Raises:
        ConfigError: there is no such module, or ``custom_imports`` is not a dict with the key 'imports'.
    """
    custom = cfg.get("custom_imports")
    if not custom:
        return
    if not isinstance(custom, dict) or not custom.get("imports") or set(custom) - _CUSTOM_IMPORTS:
        raise ConfigError(
            f"config {path}: custom_imports must be dict(imports=['my_package.my_module'], "
            f"allow_failed_imports=False), got {custom}"
        )
    names = custom["imports"]
    for module in [names] if isinstance(names, str) else names:
        try:
            importlib.import_module(module)
        except Exception as error:
            if isinstance(error, ImportError) and custom.get("allow_failed_imports", False):
                warnings.warn(f"{path}: custom_imports: {module} cannot be imported: {error}", stacklevel=2)
                continue
            if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"config {path}: there is no module {error.name}, which custom_imports names. Python looks for it "
                    "among the installed packages and in the folders that the environment variable PYTHONPATH names"
                ) from error
            add_hint(error, f"in the config: custom_imports of {path}")
            raise


def _named_like(path: str, folder: Path) -> list[str]:
    """Return the Python files in and below ``folder`` whose names are like that of ``path``."""
    files = {str(file): file.name for file in folder.rglob("*.py") if "site-packages" not in file.parts}
    near = nearest_names(Path(path).name, files.values())
    return [file for name in near for file, its_name in files.items() if its_name == name]


def _did_you_mean(candidates: list[str]) -> str:
    return f"; did you mean {' or '.join(candidates)}?" if candidates else ""


def _check_top_level_keys(cfg: Config, path: str) -> None:
    """Refuse a top-level key that is probably a misspelt key of the runner.

    Any other unknown key may be a helper variable of the config, which is a program.

    Raises:
        ConfigError: the message names the key and the most similar known one.
    """
    for key in cfg:
        if key not in _KNOWN_KEYS and (near := nearest_names(key, _KNOWN_KEYS, cutoff=0.86, count=1)):
            raise ConfigError(f"config {path}: unknown key {key!r}; did you mean {near[0]!r}?")


def _check_options(options: dict[str, Any], known_before: set[str], path: str) -> list[str]:
    """Refuse options that begin with an unknown key, and return remarks on those that change a helper variable."""
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
            f"--cfg-options {option} changes a helper variable of {path}. Keys that the config has computed from it "
            "keep the old value. Set those keys instead."
        )
    return remarks


def complete_config(cfg: Config) -> None:
    """Fill in, in place, the values of a config that follow from its other values.

    * The default scope is 'visdet'.
    * Hooks and the log count iterations if the training loop does.
    * An iteration-based run saves a checkpoint whenever it validates, and an epoch-based run after every epoch.
    * A loader without workers has ``persistent_workers=False``, which torch requires.
    * A schedule may begin after the end of training, so that a run can be shortened for a trial.

    Except for ``persistent_workers``, a value that the config gives stays.
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
        # mmengine ends a schedule without an end when training ends, and refuses one that ends before it begins.
        if isinstance(schedule, dict) and schedule.get("by_epoch", True) == by_epoch:
            begin = schedule.get("begin", 0)
            if isinstance(length, int | float) and begin >= length:
                schedule.setdefault("end", begin + 1)


def _is_iteration_based(train_cfg: dict) -> bool:
    """Return whether a ``train_cfg`` counts iterations rather than epochs."""
    return "max_iters" in train_cfg or train_cfg.get("by_epoch") is False


def _section(parent: Any, key: str) -> Any:
    """Return the dict under ``key``. If there is none, put an empty one there first."""
    if parent.get(key) is None:
        parent[key] = {}
    return parent[key]


def check_required_keys(cfg: Config, for_training: bool) -> None:
    """Check that a config has all parts that training or testing needs.

    Raises:
        ConfigError: parts are missing, which the message names; only some of the keys of validation or of testing are
            None; or the config is one of mmdetection 2.
    """
    if for_training and "data" in cfg and "train_dataloader" not in cfg:
        raise ConfigError(
            "this is a config of mmdetection 2 (`data`, `runner`); convert it to version 3's keys first"
        )
    missing = [key for key in (_TRAINING_KEYS if for_training else _TEST_KEYS) if cfg.get(key) is None]
    if missing:
        raise ConfigError(f"config {cfg.filename} lacks {', '.join(missing)}")
    for part in ("val", "test"):
        keys = [f"{part}_dataloader", f"{part}_cfg", f"{part}_evaluator"]
        none = [key for key in keys if cfg.get(key) is None]
        if 0 < len(none) < len(keys):
            raise ConfigError(
                f"config {cfg.filename}: {' and '.join(none)} {'is' if len(none) == 1 else 'are'} None. To leave out "
                f"{_STAGES[part]}, set all of {', '.join(keys)} to None"
            )


def dataset_config(cfg: Config, split: str) -> dict:
    """Return the config of the data set of a split.

    Args:
        cfg: the whole config.
        split: 'train', 'val' or 'test'.

    Raises:
        ConfigError: the config has no loader for the split, or the loader has no data set.
    """
    dataset = (cfg.get(f"{split}_dataloader") or {}).get("dataset")
    if dataset is None:
        raise ConfigError(f"config {cfg.filename} has no {split}_dataloader.dataset")
    return dataset


def check_work_dir(work_dir: str | Path, option: str = "--work-dir") -> None:
    """Create ``work_dir`` and write a temporary file in it, so that a run fails early and not at its first checkpoint.

    Args:
        work_dir: the folder.
        option: the option of the command line by which the user chooses the folder, for the message.

    Raises:
        UserError: the folder cannot be written. The message names the folder and the reason.
    """
    try:
        os.makedirs(work_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=work_dir) as file:
            file.write(b"\0")
    except OSError as error:
        raise UserError(
            f"folder {work_dir} cannot be written: {error.strerror or error}; choose another one with {option}"
        ) from error
