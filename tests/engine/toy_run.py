"""Runs of the toy detector inside the test process."""

import copy
import itertools
import os
import socket
from pathlib import Path

import pytest
import torch
from instances import predictions_of
from mmengine.config import Config
from mmengine.hooks import Hook
from torch.testing import assert_close

from visdet.engine import Detections, Detector, DetRunner, build_runner, load_config, set_resume
from visdet.engine.process.process_group import leave_process_group
from visdet.structures import DetDataSample

CONFIG = str(Path(__file__).with_name("toy_config.py"))
EPOCHS = {
    "train_cfg": {"_delete_": True, "type": "EpochBasedTrainLoop", "max_epochs": 4, "val_interval": 1},
    "param_scheduler": [{"type": "MultiStepLR", "milestones": [3], "by_epoch": True}],
}
PIPELINE = [
    {"type": "LoadImageFromFile", "channel_order": "rgb"},
    {"type": "LoadAnnotations", "with_bbox": True},
    {"type": "PackDetInputs"},
]
_names = itertools.count()


class RecordLosses(Hook):
    """Keeps {iteration: loss} of a run."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.losses[runner.iter + 1] = float(outputs["loss"].detach())


def toy_config(work_dir: Path, **options) -> Config:
    """Return the toy config, or another ``config``, with ``options`` (dots as double underscores) and its own name.

    mmengine keeps one log and message hub per name, and names runs by the second they start in.
    """
    config = options.pop("config", CONFIG)
    options = {key.replace("__", "."): copy.deepcopy(value) for key, value in options.items()}
    cfg, _ = load_config(config, options, str(work_dir))
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


def error_of(work_dir: Path, **options) -> Exception:
    """Return the error by which a run with these options ends."""
    with pytest.raises(Exception) as caught:
        build_runner(toy_config(work_dir, **options)).train()
    return caught.value


def hooks_of(runner: DetRunner, kind: type[Hook]) -> list[Hook]:
    return [hook for hook in runner.hooks if isinstance(hook, kind)]


def losses(runner: DetRunner) -> dict[int, float]:
    """Return {iteration: loss} of a run."""
    return hooks_of(runner, RecordLosses)[0].losses


def detector_of(folder: Path, checkpoint=None, **options) -> Detector:
    """Return a detector of the toy config, which reads image files."""
    options = {"test_dataloader__dataset__pipeline": PIPELINE, **options}
    return Detector(toy_config(folder, **options), checkpoint, "cpu")


def detections(*rows, draw=None, image=None, **metainfo) -> Detections:
    """Return detections of (class, score, box) in an image of 40 x 50 pixels."""
    sample = DetDataSample(metainfo={"ori_shape": (40, 50), **metainfo})
    sample.pred_instances = predictions_of([(label, box, score) for label, score, box in rows])
    return Detections(sample, ("a", "b"), image=image, draw=draw)


class Killed(Exception):
    """The end of a run that was killed."""


def interrupted(work_dir: Path, at: int, **options) -> None:
    """Train until iteration ``at`` with a checkpoint there, as a run killed right after writing it leaves behind."""
    runner = toy_runner(work_dir, **options)
    save = runner.save_checkpoint

    def save_then_die(out_dir, filename, *args, **kwargs):
        save(out_dir, filename, *args, **kwargs)
        if filename == f"iter_{at}.pth":
            (work_dir / "last_checkpoint").write_text(str(work_dir / filename))
            raise Killed

    runner.save_checkpoint = save_then_die
    with pytest.raises(Killed):
        runner.train()


def check_two_halves(folder: Path, at: int, **options) -> tuple[DetRunner, DetRunner]:
    """Compare a run with one that is killed at an iteration and resumed, and return both."""
    by_iteration = {"type": "CheckpointHook", "by_epoch": False, "interval": at}
    options = {"default_hooks__checkpoint": by_iteration, **options}
    whole = train(folder / "whole", **options)
    interrupted(folder / "halves", at, **options)
    rest = train(folder / "halves", resume="auto", **options)
    check_rest(whole, rest, at)
    return whole, rest


def check_rest(whole: DetRunner, rest: DetRunner, at: int) -> None:
    """Check that a run that was resumed after an iteration is the rest of the whole one, bit for bit."""
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > at} != {}
    assert_close(weights(rest), weights(whole), rtol=0, atol=0)


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


def save_weights(rank: int, folder: Path, *runners: DetRunner) -> None:
    """Write the results of a process for ``check_equal_weights``."""
    torch.save([weights(runner) for runner in runners], folder / f"result{rank}.pt")


def validations(runner: DetRunner) -> list[float]:
    """Return the accuracies of a run's validations."""
    return runner.message_hub.get_scalar("val/toy/accuracy").data[0].tolist()


def check_equal_weights(folder: Path) -> None:
    """Compare the two results of each process.

    Batch statistics are left out, because checkpoints hold those of the main process alone.
    """
    for rank in (0, 1):
        whole, rest = torch.load(folder / f"result{rank}.pt")
        for name, value in whole.items():
            assert "running" in name or torch.equal(value, rest[name]), name
