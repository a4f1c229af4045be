"""Runs of the toy detector inside the test process."""

import copy
import itertools
import os
import socket
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.hooks import Hook

from visdet.engine import DetRunner, build_runner, load_config, set_resume
from visdet.engine.process.process_group import leave_process_group

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


def in_two_processes(function, folder: Path) -> None:
    """Call ``function(rank, folder)`` in two processes, which ``launcher='pytorch'`` joins."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(_call, (port, function, folder), 2, start_method="forkserver")


def _call(rank: int, port: int, function, folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    function(rank, folder)
    leave_process_group()


def check_equal_weights(folder: Path) -> None:
    """Compare the two results of each process.

    Batch statistics are left out, because checkpoints hold those of the main process alone.
    """
    for rank in (0, 1):
        whole, rest = torch.load(folder / f"result{rank}.pt")
        for name, value in whole.items():
            assert "running" in name or torch.equal(value, rest[name]), name
