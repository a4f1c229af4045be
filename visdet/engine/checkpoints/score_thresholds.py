"""Thresholds of scores that an evaluation has measured: those of the best F1 of each class."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from visdet.errors import UserError
from visdet.files.writing import write_atomically

from .held_config import meta_of

CURVES = "precision_recall.json"  # what ``visdet test`` writes; checkpoints without thresholds of their own have it
DEFAULT_THRESHOLD = 0.3


def reports_of(metrics: Iterable[Any]) -> dict[str, Any]:
    """Return the ``curve_report`` of each metric that has one, by the prefix of the metric."""
    return {metric.prefix: metric.curve_report for metric in metrics if getattr(metric, "curve_report", None)}


def write_curves(metrics: Iterable[Any], folder: str) -> list[str]:
    """Write the reports of the metrics to :data:`CURVES`, and their pictures, and return the paths."""
    reports = reports_of(metrics)
    if not reports:
        return []
    path = Path(folder, CURVES)
    records = {name: report.to_dict() for name, report in reports.items()}
    write_atomically(path, json.dumps(records, ensure_ascii=False))
    files = [str(path)]
    for name, report in reports.items():
        files += report.draw(folder, name)
    return files


def thresholds_in(records: Mapping[str, Any]) -> dict[str, float]:
    """Return the threshold of each class in the ``to_dict`` of reports by the names of their metrics."""
    found = {}
    for record in records.values():
        for name, curve in record["classes"].items():
            if curve["best_threshold"] is not None:
                found[name] = float(curve["best_threshold"])
    return found


def thresholds_of(metrics: Iterable[Any]) -> dict[str, float]:
    """Return the threshold of each class that the last evaluation of the metrics has measured."""
    return thresholds_in({name: report.to_dict() for name, report in reports_of(metrics).items()})


def measured_thresholds(
    content: Mapping[str, Any], path: str | os.PathLike | None
) -> tuple[dict[str, float], str]:
    """Return the threshold of each class that was measured for a checkpoint, and where they come from.

    Args:
        content: the checkpoint. It holds the thresholds of its own validation.
        path: its file, or None. A checkpoint that holds none has those of :data:`CURVES` in its folder.

    Raises:
        UserError: that file is damaged.
    """
    own = meta_of(content).get("score_thresholds")
    if isinstance(own, Mapping) and own:
        return {str(name): float(value) for name, value in own.items()}, "the checkpoint's validation"
    curves = Path(path or "").parent / CURVES
    if path is None or own is not None or not curves.is_file():
        return {}, "no validation has measured them"
    try:
        return thresholds_in(json.loads(curves.read_text(encoding="utf-8"))), str(curves)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UserError(f"{curves} cannot be used, remove it: {type(error).__name__}: {error}") from error


def told_thresholds(names: Iterable[str], thresholds: Iterable[float], origin: str) -> str:
    """Return a line on the thresholds that a command uses and where they come from."""
    pairs = list(zip(names, thresholds, strict=True))
    shown = ", ".join(f"{name} {value:.2f}" for name, value in pairs[:8]) + (", …" if len(pairs) > 8 else "")
    return f"thresholds of scores ({origin})" + (shown and f": {shown}")
