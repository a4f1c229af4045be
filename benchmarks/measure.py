"""Measurement of one case in one dtype, which gives the gate, the times, the peers and the figures as JSON."""

import dataclasses
import gc
import warnings
from typing import Any

import torch
from torch import Tensor

from .case import PASSES, Call, Case, Peer, Work, dtype_name
from .floors import Floors
from .gate import Gate, check, relative_error
from .timing import time_pass

SECONDS = {"cuda": 0.15, "cpu": 1.0}  # the duration of the repetitions for one figure
QUICK_SECONDS = {"cuda": 0.02, "cpu": 0.05}


def passes_for(device: torch.device) -> tuple[str, ...]:
    """Return the passes to time on ``device``. The unfilled pass is timed on GPUs only."""
    return PASSES if device.type == "cuda" else PASSES[:4]


def measure(
    case: Case, dtype: torch.dtype, device: torch.device, floors: Floors, quick: bool = False
) -> dict[str, Any]:
    """Return the results of ``case`` in ``dtype``. With a red gate, nothing is timed."""
    result: dict[str, Any] = {
        "op": case.op,
        "case": case.name,
        "sizes": case.sizes,
        "dtype": dtype_name(dtype),
        "passes": {},
        "failures": {},  # pass: the reason for which it could not be timed
        "peers": {},
    }
    try:
        arguments = case.make(dtype, device)
        gate, grad_output = check(case, arguments)
    except RuntimeError as error:  # The reason may be lack of memory, a missing library or a missing dtype.
        result["gate"] = {"passed": False, "problems": [_first_line(error)], "errors": {}}
        return result
    result["gate"] = {
        "passed": not gate.problems,
        "problems": gate.problems,
        "errors": gate.errors,
        "tolerance": gate.tolerance,
    }
    if gate.problems:
        return result
    seconds = (QUICK_SECONDS if quick else SECONDS)[device.type]
    _add_passes(result, case, dtype, case.call(arguments), grad_output, floors, seconds)
    for peer in case.peers:
        entry = _measure_peer(peer, case, arguments, grad_output, gate, seconds)
        if entry is not None:
            result["peers"][peer.name] = entry
    if case.peers:
        _add_ratios(result)
    return result


def _add_passes(
    result: dict[str, Any],
    case: Case,
    dtype: torch.dtype,
    call: Call,
    grad_output: Tensor,
    floors: Floors,
    seconds: float,
) -> None:
    """Time the passes of the operator. If one fails, its reason is kept and the others are still timed."""
    device = grad_output.device
    work = case.work(dtype)
    passes = result["passes"]
    for kind in passes_for(device) if case.differentiable else ("forward",):
        try:
            timing = time_pass(call, kind, grad_output, case.graph, seconds)
        except RuntimeError as error:
            result["failures"][kind] = _first_line(error)
            continue
        parts = [work["forward"], work["backward"]] if kind == "both" else [work[kind.split("_")[0]]]
        passes[kind] = {
            "time": dataclasses.asdict(timing),
            **_figures(parts, timing.median_us, floors, case.graph),
        }


def _figures(parts: list[Work], median_us: float, floors: Floors, warm: bool) -> dict[str, Any]:
    """Return the floor of a pass that consists of one or two parts, which run one after another."""
    floor_us = sum(floors.bound(part, warm) for part in parts) * 1e6
    return {
        "floor_us": floor_us,
        "percent_of_floor": 100 * floor_us / median_us,
    }


def _measure_peer(
    peer: Peer, case: Case, arguments: tuple[Any, ...], grad_output: Tensor, gate: Gate, seconds: float
) -> dict[str, Any] | None:
    """Return the times and the forward error of a peer, or None if it is missing.

    A failure of the peer is reported as a line of text.
    """
    try:
        adapt = peer.load()
    except (ImportError, OSError):
        return None
    entry: dict[str, Any] = {"passes": {}}
    try:
        call = adapt(*arguments)
        with torch.no_grad():
            output = call.function(*call.arguments)
        entry["output_error"] = max(relative_error(output[chosen], exact) for chosen, exact in gate.expected)
        del output
        for kind in ("forward", "backward", "both") if case.differentiable else ("forward",):
            entry["passes"][kind] = dataclasses.asdict(
                _time_peer(call, kind, grad_output, case.graph, seconds)
            )
    except Exception as error:  # Any failure of another project is a result.
        entry["problem"] = _first_line(error)
    gc.collect()
    return entry


def _time_peer(call: Call, kind: str, grad_output: Tensor, graph: bool, seconds: float) -> Any:
    """Time a peer in the same way as the operator. If it cannot be captured in a graph, it is timed without one."""
    if graph and grad_output.is_cuda:
        try:
            return time_pass(call, kind, grad_output, True, seconds)
        except RuntimeError as error:
            warnings.warn(f"no CUDA graph: {_first_line(error)}", stacklevel=2)
            torch.cuda.synchronize()
    return time_pass(call, kind, grad_output, False, seconds)


def _add_ratios(result: dict[str, Any]) -> None:
    """Add the ratio of each peer's times to the operator's."""
    for entry in result["peers"].values():
        entry["times_slower"] = {
            kind: timing["median_us"] / result["passes"][kind]["time"]["median_us"]
            for kind, timing in entry["passes"].items()
            if kind in result["passes"]
        }


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
