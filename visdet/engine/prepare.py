"""From a config and the switches of a command line to a runner."""

import os
from pathlib import Path

from mmengine.config import Config
from mmengine.runner import Runner

from visdet.registry import RUNNERS

from .checkpoint import check_checkpoint_exists
from .config import check_work_dir
from .errors import ConfigError
from .resume import AUTO

__all__ = [
    "build_runner",
    "draw_detections",
    "enable_amp",
    "enable_auto_scale_lr",
    "set_resume",
    "write_detections",
]


def build_runner(cfg: Config) -> Runner:
    """Build the runner that the config names (``runner_type``), by default this package's.

    Raises:
        UserError: the work_dir cannot be written, or the checkpoint to start from is not there; both are
            found out before anything is built.
    """
    check_work_dir(cfg.work_dir)
    resume, load_from = cfg.get("resume") or False, cfg.get("load_from")
    if isinstance(resume, str) and resume != AUTO:
        check_checkpoint_exists(resume, folder_is_fine=True)
    may_resume = resume == AUTO and any(Path(cfg.work_dir).glob("*.pth"))
    if load_from and not may_resume:
        check_checkpoint_exists(load_from, folder_is_fine=resume is True)
    cfg.setdefault("runner_type", "DetRunner")
    return RUNNERS.build(cfg)


def set_resume(cfg: Config, resume: str) -> None:
    """Resume from the work_dir's newest checkpoint ('auto'), from a checkpoint file, or from another run's folder.

    The config's ``load_from`` stays: a run that 'auto' finds no checkpoint of begins from those weights.
    """
    cfg.resume = AUTO if resume == AUTO else os.path.expanduser(resume)


def enable_amp(cfg: Config) -> None:
    """Train under autocast: bfloat16, or the ``dtype`` that the config's AmpOptimWrapper names.

    Raises:
        ConfigError: the config's optimizer wrapper is of another kind.
    """
    kind = cfg.optim_wrapper.get("type", "OptimWrapper")
    if kind == "AmpOptimWrapper":
        return
    if kind != "OptimWrapper":
        raise ConfigError(f"--amp needs optim_wrapper.type to be 'OptimWrapper', the config has {kind!r}")
    cfg.optim_wrapper.type = "AmpOptimWrapper"


def enable_auto_scale_lr(cfg: Config) -> None:
    """Scale the learning rate by the total batch size over ``auto_scale_lr.base_batch_size``.

    Raises:
        ConfigError: the config does not say which batch size its learning rate is for.
    """
    if not (cfg.get("auto_scale_lr") or {}).get("base_batch_size"):
        raise ConfigError(
            "--auto-scale-lr: the config does not say which total batch size its learning rate is for; add "
            "auto_scale_lr = dict(base_batch_size=...) to it"
        )
    cfg.auto_scale_lr.enable = True


def write_detections(cfg: Config, out_file: str) -> None:
    """Write the detections of a test to a JSON file.

    Raises:
        ConfigError: ``out_file`` is not named ``*.json``.
    """
    if not out_file.endswith(".json"):
        raise ConfigError(f"--out must name a .json file, got {out_file!r}")
    evaluators = cfg.test_evaluator if isinstance(cfg.test_evaluator, list | tuple) else [cfg.test_evaluator]
    cfg.test_evaluator = [*evaluators, {"type": "DumpDetections", "out_file": out_file}]


def draw_detections(cfg: Config, folder: str) -> None:
    """Draw the detections of a test beside the ground truth, into ``folder``."""
    if cfg.get("default_hooks") is None:
        cfg.default_hooks = {}
    hooks = cfg.default_hooks
    hook = hooks.get("visualization") or {"type": "DetVisualizationHook"}
    hooks["visualization"] = {**hook, "test_out_dir": os.path.abspath(folder)}
