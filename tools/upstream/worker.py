"""One row of the table, in a process of its own.

python worker.py RECIPE FOLDER DEVICE SCALE REPORT check|compare|time SAMPLES

The process runs in the checkout's folder. It appends a line of JSON to the report for each stage that it reaches.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path.cwd()), str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from upstream.cpu import CpuForCuda, Nothing  # noqa: E402
from upstream.recipes import RECIPES  # noqa: E402


class Report:
    """The stages that have been reached."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, stage: str, value: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([stage, value]) + "\n")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable]:
        """Write the obstacle where the body raises an error, and the given value otherwise."""
        value: list[object] = ["yes"]
        try:
            yield value.append
        except Exception as error:
            traceback.print_exc()
            self.add("obstacle", f"{name}: {one_line(error)}")
            raise
        self.add(name, value[-1])


def one_line(error: BaseException) -> str:
    """Return the type and the first line of an error, and the last place in the checkout where it was raised."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd())]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text[:160]}{place}"


def numbers(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of floating-point numbers in a nested result."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = torch.from_numpy(value)
    if torch.is_tensor(value) and value.is_floating_point():
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from numbers(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from numbers(entry)
    elif hasattr(value, "__dict__"):
        yield from numbers(vars(value))


def train(runner: Any, model: torch.nn.Module, work: Path, report: Report, answers: Any) -> None:
    """Take two training steps."""
    model.train()
    losses, counts = [], []
    for batch in runner.batches(work, training=True):
        with report.stage("loss") as result:
            with answers.available():
                loss = runner.train_step(batch)
            losses.append(f"{loss.item():.3g}")
            if not loss.isfinite():
                raise FloatingPointError(f"the loss is {loss.item()}")
            result(", ".join(losses))
        with report.stage("gradients") as result:
            answers.backward(loss)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            wrong = sum(not bool(g.isfinite().all()) for g in gradients)
            if wrong or not gradients:
                raise FloatingPointError(f"{wrong} of {len(gradients)} gradients are not finite")
            counts.append(str(len(gradients)))
            result(counts[-1])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 25.0)
        runner.optimizer.step()
        runner.optimizer.zero_grad()


def predict(runner: Any, model: torch.nn.Module, work: Path, report: Report, answers: Any) -> None:
    """Predict two frames or images."""
    model.eval()
    with report.stage("prediction") as result, torch.no_grad():
        tensors = []
        for batch in runner.batches(work, training=False):
            with answers.available():
                tensors += numbers(runner.predict(batch))
        wrong = sum(not bool(tensor.isfinite().all()) for tensor in tensors)
        if wrong or not tensors:
            raise FloatingPointError(f"{wrong} of {len(tensors)} predicted tensors are not finite")
        result(f"{sum(tensor.numel() for tensor in tensors)} numbers")


def main(name: str, work: Path, device: str, scale: float, report: Report, task: str, samples: int) -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    np.set_printoptions(threshold=10)
    answers = CpuForCuda() if device == "cpu" else Nothing()
    runner = recipe.runner()
    try:
        if task == "compare":
            from upstream.compare import compare

            runner.exact, runner.half = True, False
            compare(runner, work, device, scale, report, answers)
        elif task == "time":
            from upstream.times import measure

            with report.stage("times"):
                measure(runner, work, device, scale, samples, report, answers)
        else:
            with answers:
                check(runner, work, device, scale, report, answers)
    finally:
        if answers.asked:
            report.add("asked_for_cuda", True)


def check(runner: Any, work: Path, device: str, scale: float, report: Report, answers: Any) -> None:
    """Build the model, train it and predict."""
    with report.stage("imports"):
        runner.imports()
    with report.stage("builds") as result:
        model = runner.build(work, device, scale)
        result(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M")
    for part in (train, predict):
        with contextlib.suppress(Exception), report.stage(part.__name__):  # The report has the error.
            part(runner, model, work, report, answers)


if __name__ == "__main__":
    if "--help" in sys.argv:
        print(
            "usage: python -m tools.upstream.worker: the process of one model, which tools/check_upstream.py starts"
        )
    else:
        name, folder, device, scale, path, task, samples = sys.argv[1:]
        main(name, Path(folder), device, float(scale), Report(Path(path)), task, int(samples))
