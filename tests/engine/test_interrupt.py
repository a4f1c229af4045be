"""A run that a signal ends goes on, bit for bit, as if it had not been interrupted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mmengine.hooks import Hook
from toy_run import (
    EPOCHS,
    check_equal_weights,
    check_rest,
    in_two_processes,
    save_weights,
    toy_runner,
    train,
    validations,
)

from visdet.engine import read_checkpoint, tool_session

ITERATIONS = {"train_cfg__max_iters": 16}
ACCUMULATED = {"optim_wrapper__accumulative_counts": 5, "custom_hooks": [{"type": "EMAHook"}]}
WORKERS = {"train_dataloader__num_workers": 1}


class SignalAt(Hook):
    """Sends a signal to its own process, and to its workers, before an iteration or in a validation."""

    def __init__(self, number: int, at: int, stage: str = "train") -> None:
        self.number, self.at, self.stage = number, at, stage

    def _before_iter(self, runner, batch_idx, data_batch=None, mode="train"):
        if mode == self.stage and runner.iter == self.at:
            os.killpg(0, self.number)


def run(folder, number, at, stage, options) -> None:
    with tool_session():
        runner = toy_runner(folder, **options)
        runner.register_hook(SignalAt(number, at, stage))
        runner.train()


def interrupted(folder, number, at, options, stage="train") -> str:
    """Run in a process of its own group, and return what it writes to stderr."""
    arguments = f"pathlib.Path({str(folder)!r}), {int(number)}, {at}, {stage!r}, {options!r}"
    code = f"import pathlib, test_interrupt\ntest_interrupt.run({arguments})"
    here = Path(__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": f"{here.parents[1]}:{here.parent}:{here}"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, start_new_session=True, timeout=100
    )
    assert done.returncode == 128 + number, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGINT, {**ITERATIONS, **ACCUMULATED}),
        (signal.SIGTERM, {**EPOCHS, **WORKERS, "train_cfg__max_epochs": 3}),
        (signal.SIGUSR1, {**ITERATIONS, **WORKERS, "default_hooks__checkpoint__save_optimizer": False}),
    ],
    ids=["ctrl-c-accumulated-ema", "sigterm-inside-an-epoch", "sigusr1-workers"],
)
def test_a_run_that_is_interrupted_goes_on_as_if_it_had_not_been(tmp_path, number, options):
    said = interrupted(tmp_path / "halves", number, 7, options)
    assert f"`--resume {tmp_path}/halves/interrupted.pth` continues the run" in said
    whole = train(tmp_path / "whole", **options)
    rest = train(tmp_path / "halves", resume="auto", **options)
    check_rest(whole, rest, 8)


def test_an_interrupted_validation_is_made_up_for(tmp_path):
    said = interrupted(tmp_path, signal.SIGTERM, 10, {}, stage="val")
    assert "iter_10.pth` continues the run" in said and not (tmp_path / "interrupted.pth").exists()
    rest = train(tmp_path, resume="auto")
    assert len(validations(rest)) == 2


def test_a_second_signal_ends_a_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "monotonic", iter(range(0, 10**6, 6)).__next__)
    runner = toy_runner(tmp_path)
    for _ in range(2):
        runner.register_hook(Kill())
    with pytest.raises(KeyboardInterrupt, match="ended by SIGTERM"):
        runner.train()
    assert not list(tmp_path.glob("*.pth"))


class Kill(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        os.kill(os.getpid(), signal.SIGTERM)


def run_process(rank, folder):
    """Each process goes on with its own gradients, as it is interrupted between two updates."""
    options = {"train_cfg__max_iters": 12, "launcher": "pytorch", "optim_wrapper__accumulative_counts": 5}
    whole = train(folder / "whole", **options)
    runner = toy_runner(folder / "rest", **options)
    if rank == 1:  # The other process hears of it.
        runner.register_hook(Kill5())
    try:
        runner.train()
    except KeyboardInterrupt as error:
        assert error.number == signal.SIGTERM
    rest = train(folder / "rest", resume="auto", **options)
    save_weights(rank, folder, whole, rest)


class Kill5(Kill):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 5:
            super().before_train_iter(runner, batch_idx)


@pytest.mark.timeout(120)
def test_two_processes_stop_together(tmp_path):
    in_two_processes(run_process, tmp_path)
    assert read_checkpoint(tmp_path / "rest" / "interrupted.pth")["meta"]["iter"] == 7
    check_equal_weights(tmp_path)
