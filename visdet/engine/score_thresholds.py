"""The thresholds of scores that an evaluation has measured, for pictures of detections."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visdet.errors import UserError

__all__ = ["CURVES", "DEFAULT_THRESHOLD", "measured_thresholds", "thresholds_for"]

CURVES = "precision_recall.json"  # what validation and ``visdet test`` write into the work_dir
DEFAULT_THRESHOLD = 0.3


def thresholds_for(
    checkpoint: str | os.PathLike | None, classes: Sequence[str], metric: str = "coco"
) -> list[float]:
    """Return the score of the best F1 of each class that was measured in the folder of a checkpoint, or else 0.3.

    Args:
        checkpoint: the path of the checkpoint, or None.
        classes: the names of the classes.
        metric: the prefix of the metric.

    Raises:
        UserError: the file of the measurement is damaged.
    """
    path = None if checkpoint is None else Path(checkpoint).parent / CURVES
    if path is None or not path.is_file():
        return [DEFAULT_THRESHOLD] * len(classes)
    try:
        measured = json.loads(path.read_text(encoding="utf-8"))
        return measured_thresholds(measured.get(metric, {}), classes)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read, remove it: {type(error).__name__}: {error}") from error


def measured_thresholds(curves: Mapping[str, Any], classes: Sequence[str]) -> list[float]:
    """Return the threshold of each class in the record of a metric, and 0.3 for a class that has none."""
    measured = curves.get("classes", {})
    found = [measured.get(name, {}).get("best_threshold") for name in classes]
    return [DEFAULT_THRESHOLD if threshold is None else float(threshold) for threshold in found]
