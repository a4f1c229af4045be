"""The times of training steps and predictions: a repository's SparseDrive, and visdet's own model by CUDA graphs."""

import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.models import MAX_NORM, prediction, training_step
from visdet.engine.graphs.methods import GraphedLoss, GraphedPrediction
from visdet.engine.process.garbage import living_objects_not_collected
from visdet.registry import MODELS

from .compare import samples_of

__all__ = ["measure"]

# The shapes of a temporal model change until its history is full, and graphs are captured the second time.
WARM_UP, STEPS = 8, 12
CPU_STEPS = 1  # The figures of a machine without a GPU mean little.


def measure(
    runner: Any, work: Path, device: str, scale: float, samples: int, report: Any, answers: Any
) -> None:
    """Report a row for each model and type of numbers: 16 bits, as the repository's config says, and float32.

    A training step has ``samples`` samples, and a prediction has one. All frames are on the device beforehand.
    ``answers`` surrounds the repository's code, and ``answers.available`` its forward.
    """
    with answers:
        runner.imports()
    frames: dict[bool, list] = {}
    for half in (True, False) if device != "cpu" else (False,):
        runner.half = half
        with answers:
            theirs = runner.build(work, device, scale)
            for training in () if frames else (True, False):
                batches = runner.batches(work, training, samples if training else 1)
                frames[training] = [runner.scattered(batch) for batch in batches]
            steps = upstream_steps(theirs, runner.optimizer, device, half, answers.available)
            cells = timed(steps, theirs, frames, device)
        report.add("time", ["upstream", "float16" if half else "float32", *cells])
        ours = MODELS.build(runner.plain_model).to(device)
        ours.load_state_dict(theirs.state_dict())
        del theirs, steps, runner.parallel, runner.optimizer
        own_frames = {
            training: [{"inputs": data["img"], "data_samples": samples_of(data)} for data in batches]
            for training, batches in frames.items()
        }
        with torch.autograd.set_multithreading_enabled(False):
            cells = timed(own_steps(ours, device, half), ours, own_frames, device)
        report.add("time", ["visdet", "bfloat16" if half else "float32", *cells])
        del ours


def upstream_steps(
    model: Any, optimizer: Any, device: str, half: bool, available: Callable
) -> dict[bool, Callable]:
    """Return a training step as mmcv's hooks take it, and a prediction."""
    scaler = torch.amp.GradScaler(device, init_scale=32.0, enabled=half)

    def train(data: dict) -> None:
        with available():
            loss = model.train_step(data, optimizer)["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM["sparsedrive"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    @torch.no_grad()
    def predict(data: dict) -> Any:
        with available():
            return model(return_loss=False, rescale=True, **data)

    return {True: train, False: predict}


def own_steps(model: Any, device: str, half: bool) -> dict[bool, Callable]:
    """Return a training step and a prediction of visdet's model, on batches in its own form."""
    autocast = torch.autocast(device, dtype=torch.bfloat16, enabled=half)
    graphed = () if device == "cpu" else (GraphedLoss, GraphedPrediction)
    graphs = {kind.method: kind(model) for kind in graphed}
    train, predict = training_step(model, MAX_NORM["sparsedrive"], graphs), prediction(model, graphs)
    steps: dict[bool, Callable] = {True: train, False: predict}
    return {training: partial(step, autocast=autocast) for training, step in steps.items()}


def timed(steps: dict[bool, Callable], model: Any, frames: dict[bool, list], device: str) -> list[str]:
    """Return the median times of a training step and of a prediction, and the memory that training reserves.

    What graphs hold is reserved, but it is not counted as allocated.
    """
    times, memory = [], "-"
    warm_up, count = (WARM_UP, STEPS) if device != "cpu" else (0, CPU_STEPS)
    for training in (True, False):
        model.train(training)
        seconds = []
        if device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with living_objects_not_collected():
            for turn in range(warm_up + count):
                # The repository's code may change its inputs.
                data = copy.deepcopy(frames[training][turn % len(frames[training])])
                synchronize(device)
                start = time.perf_counter()
                steps[training](data)
                synchronize(device)
                seconds.append(time.perf_counter() - start)
        times.append(f"{1e3 * float(np.median(seconds[warm_up:])):.1f} ms")
        if training and device != "cpu":
            memory = f"{torch.cuda.max_memory_reserved() / 2**30:.1f} GiB"
    return [*times, memory]


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
