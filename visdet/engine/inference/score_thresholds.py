"""Thresholds of scores that an evaluation has measured: those of the best F1 of each class."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from visdet.errors import UserError
from visdet.files.writing import write_atomically

CURVES = "precision_recall.json"  # the file in the work_dir that validation and ``visdet test`` write
DEFAULT_THRESHOLD = 0.3


def write_curves(metrics: Iterable[Any], folder: str, with_pictures: bool) -> list[str]:
    """Write the ``curve_report`` of each metric to :data:`CURVES`, and its pictures, and return the paths."""
    reports = {
        metric.prefix: metric.curve_report for metric in metrics if getattr(metric, "curve_report", None)
    }
    if not reports:
        return []
    path = Path(folder, CURVES)
    records = {name: report.to_dict() for name, report in reports.items()}
    write_atomically(path, json.dumps(records, ensure_ascii=False))
    drawn = (
        [file for name, report in reports.items() for file in report.draw(folder, name)]
        if with_pictures
        else []
    )
    return [str(path), *drawn]


def thresholds_in(records: dict[str, Any]) -> dict[str, float]:
    """Return the threshold of each class in the ``to_dict`` of reports by the names of their metrics."""
    classes = {name: curve for record in records.values() for name, curve in record["classes"].items()}
    found = {name: curve["best_threshold"] for name, curve in classes.items()}
    return {name: float(threshold) for name, threshold in found.items() if threshold is not None}


def measured_thresholds(checkpoint: str | os.PathLike | None) -> dict[str, float]:
    """Return the threshold of each class that was measured in the folder of a checkpoint, which may be none.

    Raises:
        UserError: the file of the measurement is damaged.
    """
    path = Path(checkpoint or "").parent / CURVES
    if checkpoint is None or not path.is_file():
        return {}
    try:
        return thresholds_in(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be used, remove it: {type(error).__name__}: {error}") from error
