"""Time training steps and predictions of whole models, and write a table and JSON.

The command is ``python -m benchmarks.models``. A training step is the forward pass, the backward pass in the calling
thread (as in the runner), clipping, and AdamW. Wall times are medians of steps after a warm-up, each of which begins
and ends with an idle GPU. The pace is the time of a step of several that follow one another, as in training: the host
prepares a step while the GPU is still busy with the one before. On a GPU, a step of each case is profiled after all of
these times are known. Its busy time is the time in which at least one kernel runs. This needs the extra ``train``.
Without a GPU the models are tiny, so that everything runs but the figures mean nothing.
"""

import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType

from visdet.engine.graphs.methods import GraphedLoss, GraphedPrediction
from visdet.engine.process.garbage import living_objects_not_collected
from visdet.engine.stages import StagedModel

from .case import dtype_name
from .environment import describe, synchronize
from .model_inputs import Batches, deformable_detr, dino, sparsedrive
from .report import options_of, parser_of, table, write_report, write_table

WARM_UP = 4
MAX_NORM = {"deformable_detr": 0.1, "dino": 0.1, "sparsedrive": 25.0}


@dataclass(frozen=True)
class ModelCase:
    """A model at a batch size, for training or for prediction.

    Attributes:
        name: the name of the case. model: the key of MAX_NORM.
        make: a function (batch size, number of batches, folder for drawn images, tiny) -> model and batches on the CPU.
        batch_size: number of samples per batch. trains: whether training steps or predictions are timed.
    """

    name: str
    model: str
    make: Callable[[int, int, Path, bool], tuple[nn.Module, Batches]]
    batch_size: int
    trains: bool


CASES = [
    ModelCase("deformable_detr train B2", "deformable_detr", deformable_detr, 2, True),
    ModelCase("deformable_detr train B8", "deformable_detr", deformable_detr, 8, True),
    ModelCase("deformable_detr predict B1", "deformable_detr", deformable_detr, 1, False),
    ModelCase("dino train B2", "dino", dino, 2, True),
    ModelCase("dino predict B1", "dino", dino, 1, False),
    ModelCase("sparsedrive stage1 train B4", "sparsedrive", sparsedrive(stage=1), 4, True),
    ModelCase("sparsedrive stage1 predict B1", "sparsedrive", sparsedrive(stage=1), 1, False),
    ModelCase("sparsedrive stage2 predict B1", "sparsedrive", sparsedrive(stage=2), 1, False),
]


def measure(
    case: ModelCase,
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
    steps: int = 10,
    graph: bool = False,
) -> dict[str, Any]:
    """Return the times of a case and, on a GPU, its peak memory.

    Args:
        case: the case.
        dtype: bfloat16, which means autocast, or float32, which means no autocast.
        device: the device to run on.
        folder: the folder for drawn images.
        steps: number of timed steps.
        graph: run as under a config with ``graph=True``.
    """
    result: dict[str, Any] = {"case": case.name, "dtype": dtype_name(dtype)}
    milliseconds = []
    with _steps_of(case, dtype, device, folder, WARM_UP + 2 * steps, graph) as runs:
        for index, run in enumerate(runs[: WARM_UP + steps]):
            if index == WARM_UP and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            synchronize(device)
            start = time.perf_counter()
            loss = run()
            synchronize(device)
            milliseconds.append(1e3 * (time.perf_counter() - start))
        result["wall_ms"] = statistics.median(milliseconds[WARM_UP:])
        start = time.perf_counter()
        for run in runs[WARM_UP + steps :]:
            loss = run()
        synchronize(device)
        result["pace_ms"] = 1e3 * (time.perf_counter() - start) / steps
        if case.trains:
            result["loss"] = float(loss)
        if device.type == "cuda":
            result["peak_GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
    return result


def measure_gpu(
    case: ModelCase, dtype: torch.dtype, device: torch.device, folder: Path, graph: bool = False
) -> dict[str, Any]:
    """Return what the profiler records of one step on a GPU. Once it has been used, launches may take longer."""
    # The shapes of a temporal model change until its history is full, and a shape is captured the second time.
    with _steps_of(case, dtype, device, folder, 2 * WARM_UP + 1, graph) as runs:
        for run in runs[:-1]:
            run()
        return profiled(runs[-1])


@contextmanager
def _steps_of(
    case: ModelCase, dtype: torch.dtype, device: torch.device, folder: Path, count: int, graph: bool
) -> Iterator[list[Callable[[], Any]]]:
    """Give functions that take the steps of a case one by one, under the conditions of the runner.

    A temporal model gets a new frame in each of them.
    """
    torch.manual_seed(0)
    model, batches = case.make(case.batch_size, count, folder, device.type == "cpu")
    model = model.to(device).train(case.trains)
    prepared = [model.data_preprocessor(batch, case.trains) for batch in batches]
    graphed = GraphedLoss if case.trains else GraphedPrediction
    graphs = {graphed.method: graphed(model)} if graph else {}
    step = training_step(model, MAX_NORM[case.model], graphs) if case.trains else prediction(model, graphs)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)
    collecting = living_objects_not_collected() if case.trains else nullcontext()
    with collecting, torch.autograd.set_multithreading_enabled(False):  # as in the runner
        yield [partial(step, batch, autocast) for batch in prepared]


def training_step(
    model: nn.Module, max_norm: float, graphs: Any = None
) -> Callable[[dict[str, Any], Any], torch.Tensor]:
    """Return a function that runs a training step on a prepared batch: forward, backward, clipping and update."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    staged = StagedModel(model, graphs)

    def step(batch: dict[str, Any], autocast: Any) -> torch.Tensor:
        with autocast:
            loss, _ = model.parse_losses(staged.losses(**batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def prediction(model: nn.Module, graphs: Any = None) -> Callable[[dict[str, Any], Any], Any]:
    """Return a function that predicts on a prepared batch."""
    staged = StagedModel(model, graphs)

    @torch.no_grad()
    def predict(batch: dict[str, Any], autocast: Any) -> Any:
        with autocast:
            return staged.predictions(**batch)

    return predict


def profiled(function: Callable[[], Any]) -> dict[str, Any]:
    """Return the busy time and the number of kernels of a call, and the kernels that took the most time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    kernels = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    return {
        "gpu_ms": covered(spans_of(profile)) / 1e3,
        "kernels": sum(event.count for event in kernels),
        "top": [[event.key[:90], event.self_device_time_total / 1e3, event.count] for event in kernels[:20]],
    }


def spans_of(profile: Any) -> list[tuple[float, float]]:
    """Return the beginnings and ends of the kernels of a profile, in microseconds."""
    copies = ("Memcpy", "Memset")
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(copies)
    ]


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans (start, end)."""
    length, until = 0.0, -math.inf
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, until))
        until = max(until, end)
    return length


COLUMNS = {
    "wall_ms": "wall ms",
    "pace_ms": "pace ms",
    "gpu_ms": "GPU busy ms",
    "kernels": "kernels",
    "peak_GiB": "peak GiB",
}


def _text(figure: float | None) -> str:
    return "–" if figure is None else f"{figure:.1f}".removesuffix(".0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of("models", __doc__)
    parser.add_argument(
        "--cases", nargs="+", default=[""], metavar="WORD", help="cases whose name contains a WORD"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=["float32", "bfloat16"],
        default=["float32", "bfloat16"],
        help="dtypes to time (default: both)",
    )
    parser.add_argument("--graph", action="store_true", help="replay steps as CUDA graphs on a GPU")
    parser.add_argument(
        "--steps", type=int, default=10, help="number of steps that are timed (default: %(default)s)"
    )
    options = options_of(parser, arguments)
    chosen = [case for case in CASES if any(word in case.name for word in options.cases)]
    if not chosen:
        names = ", ".join(case.name for case in CASES)
        print(f"no case matches {' '.join(options.cases)}; there are: {names}", file=sys.stderr)
        return 1
    device = torch.device(options.device)
    path = options.out / "models.json"
    report: dict[str, Any] = {"environment": describe(device), "command": options.command, "results": []}
    with tempfile.TemporaryDirectory() as folder:
        runs = list(itertools.product(chosen, options.dtypes))
        for case, name in runs:
            dtype = getattr(torch, name)
            result = measure(case, dtype, device, Path(folder), options.steps, options.graph)
            report["results"].append(result)
            print(result, flush=True)
            write_report(report, path)
        if device.type == "cuda":
            for (case, name), result in zip(runs, report["results"], strict=True):
                result |= measure_gpu(case, getattr(torch, name), device, Path(folder), options.graph)
                write_report(report, path)
    rows = [
        [one["case"], one["dtype"], *(_text(one.get(column)) for column in COLUMNS)]
        for one in report["results"]
    ]
    write_table(report, table(["case", "type", *COLUMNS.values()], rows), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
