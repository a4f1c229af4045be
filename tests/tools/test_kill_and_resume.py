"""A run that is killed again and again, and resumed each time, is the run that nobody touched."""

import random
import re
import signal
import time

import pytest
import torch
from disk import names_in
from toolbox import TOY_CONFIG, kill_when, start, succeed_here

from visdet.commands.compare import parting, state_of
from visdet.engine import read_checkpoint
from visdet.engine.config.text import leaves

_KILLS = 3
_ITERATIONS = 100  # many more than three starts reach, so that every kill finds the run at work
_OPTIONS = (
    f"train_cfg.max_iters={_ITERATIONS}",
    "train_cfg.val_interval=7",
    "train_dataloader.num_workers=2",
    "train_dataloader.persistent_workers=True",
    "default_hooks.checkpoint.interval=1",
)


@pytest.mark.slow
def test_a_run_with_workers_survives_sigkill_at_random_moments(tmp_path, monkeypatch, capsys):
    seed = time.time_ns() % 2**32
    moments = random.Random(seed)
    pointer = tmp_path / "killed" / "last_checkpoint"
    folder = pointer.parent

    def last_iteration() -> int:
        # A run that is killed as it writes the pointer leaves it empty.
        names = names_in(folder, "iter_*.pth")
        text = pointer.read_text() if pointer.exists() else ""
        return max([0, *map(int, re.findall(r"iter_(\d+)", " ".join([text, *names])))])

    succeed_here(
        monkeypatch, capsys, "train", TOY_CONFIG, "--work-dir", tmp_path / "whole", "--cfg-options", *_OPTIONS
    )
    reached = []
    for _ in range(_KILLS):
        goal = last_iteration() + moments.randint(0, 6)
        process = start("train", TOY_CONFIG, "--work-dir", folder, "--resume", "--cfg-options", *_OPTIONS)
        kill_when(
            process, lambda goal=goal: last_iteration() >= goal, timeout=120, delay=0.3 * moments.random()
        )
        reached.append(last_iteration())
        # Killed between or during writes, whatever is there can be read, but for the part of a file.
        for path in folder.glob("[!.]*.pth"):
            torch.load(path, weights_only=True)
    assert 0 < reached[-1] < _ITERATIONS, f"killed while it trained: {reached}"
    printed = succeed_here(
        monkeypatch,
        capsys,
        "train",
        TOY_CONFIG,
        "--work-dir",
        folder,
        "--resume",
        "--cfg-options",
        *_OPTIONS,
    )
    resumed = int(printed.split("at iteration ")[1].split()[0])
    # The pointer may be one file behind those that are there.
    assert abs(resumed - reached[-1]) <= 1

    whole, killed = (
        read_checkpoint(tmp_path / run / f"iter_{_ITERATIONS}.pth") for run in ("whole", "killed")
    )
    print(f"moments drawn with seed {seed}, killed after iterations {reached}")
    assert parting(state_of(whole), state_of(killed)) is None
    for scalar in ("train/loss", "val/toy/accuracy"):
        histories = [dict(leaves(run["message_hub"]["log_scalars"][scalar])) for run in (whole, killed)]
        assert histories[0] and parting(*histories) is None, scalar


@pytest.mark.slow
def test_a_signal_ends_two_processes_with_what_resumes_them(tmp_path):
    command = ("train", TOY_CONFIG, "--work-dir", tmp_path, "--cfg-options", *_OPTIONS)
    process = start(*command, processes=2)
    while not (tmp_path / "last_checkpoint").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    [path] = re.findall(r"^ended by SIGTERM; `--resume (.*\.pth)` continues the run$", err, re.MULTILINE)
    assert path.startswith(str(tmp_path)) and read_checkpoint(path)
