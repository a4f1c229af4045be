"""Runs of the toy detector inside the test process."""

import copy
import itertools
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.hooks import Hook

from visdet.engine import DetRunner, build_runner, load_config, set_resume

CONFIG = str(Path(__file__).with_name("toy_config.py"))
_names = itertools.count()


class RecordLosses(Hook):
    """Keeps {iteration: loss} of a run."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.losses[runner.iter + 1] = float(outputs["loss"].detach())


def toy_config(work_dir: Path, **options) -> Config:
    """Return the toy config with ``options`` (dots as double underscores) and a name of its own.

    mmengine keeps one log and message hub per name, and names runs by the second they start in.
    """
    options = {key.replace("__", "."): copy.deepcopy(value) for key, value in options.items()}
    cfg, _ = load_config(CONFIG, options, str(work_dir))
    cfg.experiment_name = f"toy{next(_names)}"
    return cfg


def toy_runner(work_dir: Path, resume: str | None = None, **options) -> DetRunner:
    cfg = toy_config(work_dir, **options)
    if resume:
        set_resume(cfg, resume)
    runner = build_runner(cfg)
    runner.register_hook(RecordLosses())
    return runner


def train(work_dir: Path, resume: str | None = None, **options) -> DetRunner:
    """Train the toy detector and return the runner."""
    runner = toy_runner(work_dir, resume, **options)
    runner.train()
    return runner


def losses(runner: DetRunner) -> dict[int, float]:
    """Return {iteration: loss} of a run."""
    return next(hook for hook in runner.hooks if isinstance(hook, RecordLosses)).losses


def weights(runner: DetRunner) -> dict[str, torch.Tensor]:
    return runner.model.state_dict()
