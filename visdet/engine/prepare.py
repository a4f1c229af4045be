"""Building a runner from a config and the options of a command line."""

import os
from pathlib import Path
from typing import Any

from mmengine.config import Config

from visdet.registry import RUNNERS

from .checkpoints.checkpoint import check_checkpoint_exists
from .checkpoints.newest import newest_named
from .checkpoints.resume import AUTO
from .config.checks import section_of, several_of
from .errors import ConfigError
from .process.places import check_out_file, check_work_dir

_COCO_RESULTS = ".bbox.json"


def build_runner(cfg: Config) -> Any:
    """Build the runner that ``runner_type`` of the config names. The default is :class:`DetRunner`.

    Raises:
        UserError: the work_dir cannot be written, or the checkpoint to start from does not exist. Both are checked
            before anything is built.
    """
    folder = Path(cfg.work_dir)
    check_work_dir(folder)
    for stage in ("val_evaluator", "test_evaluator"):
        for metric in several_of(cfg, stage):
            if isinstance(metric, dict) and (prefix := metric.get("outfile_prefix")):
                check_work_dir(os.path.dirname(prefix) or ".", f"--cfg-options {stage}.outfile_prefix=...")
    resume = cfg.get("resume")
    load_from = cfg.get("load_from")
    if isinstance(resume, str) and resume != AUTO:
        check_checkpoint_exists(resume, folder_is_fine=True)
    may_resume = resume == AUTO and (any(folder.glob("*.pth")) or newest_named(folder))
    if load_from and not may_resume:
        check_checkpoint_exists(load_from, folder_is_fine=resume is True)
    cfg.setdefault("runner_type", "DetRunner")
    return RUNNERS.build(cfg)


def set_resume(cfg: Config, resume: str) -> None:
    """Make a config resume a run.

    The config's ``load_from`` stays. If 'auto' finds no checkpoint, the run begins from those weights.

    Args:
        cfg: the config, which is changed.
        resume: 'auto' for the newest checkpoint of the work_dir, a checkpoint file, or the folder of another run.
    """
    cfg.resume = os.path.expanduser(resume)


def enable_amp(cfg: Config) -> None:
    """Make a config train under autocast by ``AmpOptimWrapper``, whose ``dtype`` is bfloat16 by default.

    Raises:
        ConfigError: the config's optimizer wrapper is neither ``OptimWrapper`` nor ``AmpOptimWrapper``.
    """
    wrapper = cfg.optim_wrapper
    kind = wrapper.get("type", "OptimWrapper")
    if kind not in ("OptimWrapper", "AmpOptimWrapper"):
        raise ConfigError(f"--amp needs optim_wrapper.type to be 'OptimWrapper', but the config has {kind!r}")
    wrapper.type = "AmpOptimWrapper"


def enable_auto_scale_lr(cfg: Config) -> None:
    """Make a config scale its learning rate by the total batch size divided by ``auto_scale_lr.base_batch_size``.

    Raises:
        ConfigError: the config has no ``auto_scale_lr.base_batch_size``.
    """
    if not section_of(cfg, "auto_scale_lr").get("base_batch_size"):
        raise ConfigError(
            "--auto-scale-lr: the config does not say which total batch size its learning rate is for. Add "
            "auto_scale_lr = dict(base_batch_size=...) to it"
        )
    cfg.auto_scale_lr.enable = True


def write_detections(cfg: Config, out_file: str) -> None:
    """Make a config write the predictions of a test to a JSON file, which is one of COCO's results if it is so named.

    Raises:
        UserError: ``out_file`` is not named ``*.json``, or cannot be written; or it is named ``*.bbox.json``, which
            CocoMetric writes, and the config has none.
    """
    if not out_file.endswith(".json"):
        raise ConfigError(f"--out must name a .json file, got {out_file!r}")
    check_out_file(out_file)
    evaluators = several_of(cfg, "test_evaluator")
    if not out_file.endswith(_COCO_RESULTS):
        cfg.test_evaluator = [*evaluators, {"type": "DumpDetections", "out_file": out_file}]
        return
    coco = [metric for metric in evaluators if str(metric.get("type")).endswith("CocoMetric")]
    if not coco:
        raise ConfigError(
            f"--out {out_file}: COCO's results are written by CocoMetric, which test_evaluator lacks"
        )
    coco[0]["outfile_prefix"] = out_file.removesuffix(_COCO_RESULTS)


def draw_detections(cfg: Config, folder: str | os.PathLike) -> None:
    """Make a config draw the predictions of a test beside the ground truth. The pictures go to ``folder``."""
    hooks = section_of(cfg, "default_hooks")
    hook = hooks.get("visualization") or {"type": "DetVisualizationHook"}
    cfg.default_hooks = {**hooks, "visualization": {**hook, "test_out_dir": os.path.abspath(folder)}}
