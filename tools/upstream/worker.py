"""One row of the table, in a process of its own.

The process runs in the checkout's folder. It writes what it has reached to the report, which is JSON by stage. The task
is to check the repository or to compare it.
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


class Report(dict):
    """The stages that have been reached, and the first obstacle."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def add(self, stage: str, value: object) -> None:
        if stage != "obstacle" or stage not in self:
            self[stage] = value
        self.path.write_text(json.dumps(self))

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
    if not isinstance(value, (dict, list, tuple)):
        value = getattr(value, "__dict__", ())
    for part in value.values() if isinstance(value, dict) else value:
        yield from numbers(part)


def finite(what: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, or raise an error if there are none or if some have numbers that are not finite."""
    wrong = sum(not bool(tensor.isfinite().all()) for tensor in tensors)
    if wrong or not tensors:
        raise FloatingPointError(f"{wrong} of {len(tensors)} {what} are not finite")
    return tensors


def train(runner: Any, model: torch.nn.Module, work: Path, report: Report, answers: Any) -> None:
    """Take two training steps."""
    losses = []
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
            result(str(len(finite("gradients", gradients))))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 25.0)
        runner.optimizer.step()
        runner.optimizer.zero_grad()


def predict(runner: Any, model: torch.nn.Module, work: Path, report: Report, answers: Any) -> None:
    """Predict two frames or images."""
    tensors: list[torch.Tensor] = []
    with report.stage("prediction") as result, torch.no_grad():
        for batch in runner.batches(work, training=False):
            with answers.available():
                tensors += numbers(runner.predict(batch))
        finite("predicted tensors", tensors)
        result(f"{sum(tensor.numel() for tensor in tensors)} numbers")


def check(runner: Any, work: Path, device: str, scale: float, report: Report, answers: Any) -> None:
    """Build the model, train it and predict."""
    with report.stage("imports"):
        runner.imports()
    with report.stage("builds") as result:
        model = runner.build(work, device, scale)
        result(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M")
    for part in (train, predict):
        with contextlib.suppress(Exception):  # The report has the error.
            part(runner, model.train(part is train), work, report, answers)


def main(name: str, work: str, device: str, scale: str, report_path: str, task: str) -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    np.set_printoptions(threshold=10)
    answers, runner, report = (
        CpuForCuda() if device == "cpu" else Nothing(),
        recipe.runner(),
        Report(Path(report_path)),
    )
    try:
        if task == "compare":
            from upstream.compare import compare

            runner.exact, runner.half = True, False
            compare(runner, Path(work), device, float(scale), report, answers)
        else:
            with answers:
                check(runner, Path(work), device, float(scale), report, answers)
    finally:
        if answers.asked:
            report.add("asked_for_cuda", True)


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--help"]):
        print(f"usage: python -m tools.upstream.worker FOLDER WORK DEVICE SCALE REPORT TASK\n\n{__doc__}")
    else:
        main(*sys.argv[1:])
