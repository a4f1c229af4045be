"""Thresholds of scores that an evaluation has measured: those of the best F1 of each class."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from visdet.errors import listed
from visdet.files.writing import write_atomically

from .held_config import meta_of

CURVES = "precision_recall.json"  # what ``visdet test`` writes
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


def thresholds_of(metrics: Iterable[Any]) -> dict[str, float]:
    """Return the threshold of each class that the last evaluation of the metrics has measured."""
    found = {}
    for report in reports_of(metrics).values():
        for name, curve in report.classes.items():
            best = curve["best_threshold"]
            if best is not None:
                found[name] = best
    return found


def measured_thresholds(content: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """Return the threshold of each class that a checkpoint's own validation has measured, and where they come from."""
    own = meta_of(content).get("score_thresholds")
    if isinstance(own, Mapping) and own:
        return {str(name): float(value) for name, value in own.items()}, "the checkpoint's validation"
    return {}, "no validation has measured them"


def thresholds_for(names: Iterable[str], measured: Mapping[str, float]) -> list[float]:
    """Return the threshold of each class, which is 0.3 if none has been measured."""
    return [measured.get(name, DEFAULT_THRESHOLD) for name in names]


def told_thresholds(names: Iterable[str], thresholds: Iterable[float], origin: str) -> str:
    """Return a line on the thresholds that a command uses and where they come from."""
    pairs = [f"{name} {value:.2f}" for name, value in zip(names, thresholds, strict=True)]
    return f"thresholds of scores ({origin})" + (f": {listed(pairs, 8)}" if pairs else "")
