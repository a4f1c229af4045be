"""Time transformers' detectors with and without visdet.compat.transformers.

The command is ``python -m benchmarks.transformers_steps``. The models have random weights and published sizes. Their
outputs are compared first, in float32. Then stock and visdet are called in turns, so that other processes slow both
alike. Wall time is the median of synchronised calls. GPU time is the time in which at least one kernel of a call runs,
which the profiler records after all wall times are known. A training step is forward, loss and backward, without an
optimizer. The exit status is 1 if an output differs.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from visdet.compat import transformers as bridge

from .case import dtype_name
from .environment import describe, synchronize
from .models import profiled
from .report import facts_of, options_of, parser_of, table, write_report, write_table
from .transformers_models import FAMILIES, Family, Inputs, make_inputs, make_model

WAYS: dict[str, Callable[[], Any]] = {"stock": contextlib.nullcontext, "visdet": bridge.installed}
TOLERANCE = (
    1e-3  # of the largest output, in float32 and without TF32, after six layers and more of random weights
)
CALLS = 5  # timed calls of each turn on a GPU
PROFILED = 3  # calls


@contextlib.contextmanager
def same_selection(kept: list[Tensor]) -> Iterator[None]:
    """Keep the selections of ``torch.topk`` in ``kept``. If ``kept`` is already filled, select the same again.

    Otherwise, proposals whose scores are equal up to rounding may be swapped, and later results could not be compared.
    """
    original = torch.topk
    again = iter(list(kept))

    def topk(scores: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        chosen = next(again, None)
        if chosen is None:
            found = original(scores, k, dim, **options)
            kept.append(found.indices)
            return found
        return torch.return_types.topk((scores.gather(dim, chosen), chosen))

    torch.topk = topk
    try:
        yield
    finally:
        torch.topk = original


def compare_outputs(model: nn.Module, inputs: Inputs, names: Sequence[str]) -> float:
    """Return the largest difference of an output between stock and visdet, divided by its largest value."""
    found, kept = {}, []
    for name, way in WAYS.items():
        with way(), same_selection(kept), torch.no_grad():
            outputs = model.eval()(**inputs.images)
        found[name] = [outputs[key] for key in names]
    errors = []
    for one, other in zip(found["visdet"], found["stock"], strict=True):
        finite = other.isfinite()  # Grounding DINO's logits are -inf where there is no word.
        if not torch.equal(finite, one.isfinite()):
            return float("inf")
        errors.append(float((one - other)[finite].abs().max() / other[finite].abs().max()))
    return max(errors)


def predict(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> None:
    with torch.no_grad(), _autocast(model, dtype):
        model(**inputs.images)


def train(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> None:
    with _autocast(model, dtype):
        loss = model(**inputs.images, **inputs.labels).loss
    loss.backward()
    model.zero_grad()


def _autocast(model: nn.Module, dtype: torch.dtype) -> Any:
    device = next(model.parameters()).device.type
    return torch.autocast(device, dtype=torch.bfloat16, enabled=dtype != torch.float32)


def measure(step: Callable[[], None], device: torch.device, turns: int) -> dict[str, dict[str, float]]:
    """Return {"stock": ..., "visdet": ...}, each with "wall_ms"."""
    walls: dict[str, list[float]] = {name: [] for name in WAYS}
    calls = CALLS if device.type == "cuda" else 1
    for turn, (name, way) in itertools.product(range(turns + 1), WAYS.items()):
        with way():
            if device.type == "cuda" or not turn:
                step()  # Python looks up everything again in the first call after methods have been replaced.
            for _ in range(calls if turn else 0):
                synchronize(device)
                start = time.perf_counter()
                step()
                synchronize(device)
                walls[name].append(1e3 * (time.perf_counter() - start))
    return {name: {"wall_ms": statistics.median(walls[name])} for name in WAYS}


def measure_gpu(step: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Return {"stock": ..., "visdet": ...}, each with "gpu_ms" and "peak_gib"."""
    found = {}
    for name, way in WAYS.items():
        with way():
            step()  # This call is a warm-up.
            torch.cuda.reset_peak_memory_stats()
            gpu_ms = statistics.median(profiled(step)["gpu_ms"] for _ in range(PROFILED))
            found[name] = {"gpu_ms": gpu_ms, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    return found


def race(family: Family, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the results of a family, without the figures of ``add_gpu_figures``.

    Returns:
        a dict with "output_error" and "steps". Each step has the figures of stock and visdet for a mode and a dtype.
    """
    model = make_model(family, device)
    inputs = make_inputs(family, options.batch, device)
    error = compare_outputs(model, inputs, family.compared)
    result: dict[str, Any] = {"family": family.name, "output_error": error, "steps": []}
    if error <= TOLERANCE:
        for mode, name in itertools.product(options.modes, options.dtypes):
            times = measure(_step_of(model, inputs, mode, name), device, options.turns)
            result["steps"].append({"mode": mode, "dtype": name} | times)
    return result


def add_gpu_figures(result: dict[str, Any], options: argparse.Namespace, device: torch.device) -> None:
    """Add to the result of a family what the profiler says. Once it has been used, launches may take longer."""
    family = FAMILIES[result["family"]]
    model = make_model(family, device)
    inputs = make_inputs(family, options.batch, device)
    for step in result["steps"]:
        figures = measure_gpu(_step_of(model, inputs, step["mode"], step["dtype"]))
        for name in WAYS:
            step[name] |= figures[name]


def _step_of(model: nn.Module, inputs: Inputs, mode: str, dtype: str) -> Callable[[], None]:
    model.train(mode == "train")
    return partial(train if mode == "train" else predict, model, inputs, getattr(torch, dtype))


def lines_of(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table in Markdown, with one row per step. A cell has stock → visdet and their ratio."""

    def pair(step: dict[str, Any], figure: str) -> str:
        stock, ours = (step[name].get(figure) for name in WAYS)
        if stock is None or ours is None:
            return ""
        return f"{stock:.1f} → {ours:.1f} ({stock / ours:.2f}×)"

    header = ["family", "step", "GPU ms", "wall ms", "peak GiB", "output error"]
    rows = []
    for result in results:
        error = f"{result['output_error']:.1e}"
        if not result["steps"]:
            rows.append([result["family"], "not timed: the outputs differ", "", "", "", error])
        for step in result["steps"]:
            figures = [pair(step, figure) for figure in ("gpu_ms", "wall_ms", "peak_gib")]
            rows.append([result["family"], f"{step['mode']} {step['dtype']}", *figures, error])
    return table(header, rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options. Those that are not given get defaults that depend on the device."""
    parser = parser_of("transformers_steps", __doc__)
    parser.add_argument(
        "--families",
        nargs="+",
        choices=list(FAMILIES),
        default=list(FAMILIES),
        help="families of models to time (default: all)",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=["bfloat16", "float32"],
        help="dtypes to time (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    parser.add_argument(
        "--turns",
        type=int,
        help=f"number of turns, with {CALLS} timed calls on a GPU (default: 4) or one on a CPU (default: 3)",
    )
    options = options_of(parser, arguments)
    is_cpu = torch.device(options.device).type == "cpu"
    options.modes, options.batch = (["predict"], 1) if is_cpu else (["train", "predict"], 2)
    options.dtypes = options.dtypes or ["float32" if is_cpu else dtype_name(torch.bfloat16)]
    options.turns = options.turns or (3 if is_cpu else 4)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = parse(arguments)
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    report: dict[str, Any] = {
        "environment": describe(device) | {"transformers": version("transformers")},
        "command": options.command,
        "batch": options.batch,
        "results": [],
    }
    path = options.out / "transformers.json"
    print(facts_of(report), flush=True)
    for name in options.families:
        report["results"].append(race(FAMILIES[name], options, device))
        write_report(report, path)
        print("\n".join(lines_of(report["results"][-1:])[2:]), flush=True)
    for result in report["results"] if device.type == "cuda" else ():
        add_gpu_figures(result, options, device)
        write_report(report, path)
    write_table(report, lines_of(report["results"]), path)
    return 0 if all(result["steps"] for result in report["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
