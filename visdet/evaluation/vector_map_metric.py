"""Average precision of map polylines under their Chamfer distance."""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np

from visdet.checks.arguments import Names, also_takes
from visdet.registry import METRICS
from visdet.structures.polylines import resample

from .driving_metric import DrivingMetric, as_array, logged, mean_of
from .nearest_matches import Nearest
from .precision_recall import CurveReport, Found, score_curve


@METRICS.register_module()
class VectorMapMetric(DrivingMetric):
    """The AP of each map class at several Chamfer distances, and their mean ``mAP``.

    Predicted and true lines are resampled to ``num_points`` points evenly spaced by length. In each frame, the
    predictions of a class are checked in the order of their scores. A prediction is right if its nearest true line is
    not farther than the threshold and was not taken before. AP is the area under the precision, made monotonically
    decreasing, over the recall.

    Ground truth: ``vectors`` (lines [n, 2] in metres in the lidar frame) and ``vector_labels``. Predictions:
    ``vectors``, ``scores`` and ``labels`` of ``pred_map``. Lines with fewer than two points are dropped. A class
    without lines has AP 0.

    Args:
        classes: names of the labels. The default is the data set's ``map_classes``.
        thresholds: Chamfer distances in metres.
        num_points: number of points per line.
        prefix, collect_device: as in mmengine's BaseMetric.

    Raises:
        ValueError: a frame has no ``vectors``.

    Source: SparseDrive's evaluation, which is StreamMapNet's, without shapely.
    """

    default_prefix = "VectorMap"
    meta_key = "map_classes"
    metric_names = ("mAP", "*_AP")

    @also_takes(anchors=...)
    def __init__(
        self,
        classes: Names | None = None,
        thresholds: Sequence[float] = (0.5, 1.0, 1.5),
        num_points: int = 200,
        prefix: str | None = None,
        collect_device: str = "cpu",
    ) -> None:
        super().__init__(collect_device=collect_device, prefix=prefix)
        self.classes = classes
        self.thresholds = tuple(thresholds)
        self.num_points = num_points

    true_keys = ("vectors",)
    predicted_keys = ("vectors",)

    def read(self, sample: Mapping[str, Any], prediction: Mapping[str, Any]) -> dict[str, Any]:
        """Return the lines of a frame."""
        true_lines = sample["vectors"]
        self.check_true(sample, vectors=true_lines)
        lines, usable = _longer_than_a_point(prediction["vectors"])
        truth, is_line = _longer_than_a_point(true_lines)
        scores, labels = (as_array(prediction[key]).reshape(-1)[usable] for key in ("scores", "labels"))
        return {
            "gt_lines": truth,
            "gt_labels": as_array(sample["vector_labels"]).reshape(-1)[is_line],
            "lines": lines,
            "scores": scores,
            "labels": labels,
        }

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        """Return mAP and the AP of each class."""
        classes = self.names
        frames = [self._found(frame) for frame in results]
        nearest = Nearest.of(frames)
        labels = np.concatenate([np.zeros(0, int), *(frame.labels for frame in frames)])
        num_truths = [int(np.count_nonzero(labels == label)) for label in range(len(classes))]
        thresholds = self.thresholds
        are_near = [-nearest.closeness <= threshold for threshold in thresholds]
        precisions = [nearest.precisions(is_near, num_truths) for is_near in are_near]
        middle = len(thresholds) // 2
        right = nearest.are_right(are_near[middle])
        curves = {}
        rows = {}
        for label, name in enumerate(classes):
            mine = nearest.predicted == label
            count = num_truths[label]
            curves[name] = score_curve(nearest.scores[mine], right[mine], count)
            values = [of_classes[label] for of_classes in precisions]
            row: dict[str, float] = {"lines": count}
            for threshold, value in zip(thresholds, values, strict=True):
                row[f"AP@{threshold}"] = value
            row["AP"] = mean_of(values)
            rows[name] = row
        self.curve_report = CurveReport(f"Chamfer distance {thresholds[middle]:g} m", curves)
        summary = {"mAP": mean_of([row["AP"] for row in rows.values()])}
        return logged(rows, summary, "AP")

    def _found(self, frame: dict[str, Any]) -> Found:
        """Return the lines of a frame, whose closeness is the negative distance."""
        truth, lines = (_resample_all(frame[key], self.num_points) for key in ("gt_lines", "lines"))
        labels = frame["labels"]
        true_labels = frame["gt_labels"]
        is_same = labels[:, None] == true_labels
        distances = _distances(lines, truth, max(self.thresholds), is_same)
        is_crowd = np.zeros_like(true_labels, dtype=bool)
        return Found(true_labels, labels, frame["scores"], (-distances).copy, is_crowd)


def _longer_than_a_point(lines: Sequence[Any]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the lines of at least two points as arrays, and the mask of these lines among all."""
    arrays = [as_array(line) for line in lines]
    is_line = np.array([len(line) > 1 for line in arrays], dtype=bool)
    return list(compress(arrays, is_line)), is_line


def _distances(lines: np.ndarray, truth: np.ndarray, reach: float, is_same: np.ndarray) -> np.ndarray:
    """Return the Chamfer distances [m, n] of lines [m, P, 2] and [n, P, 2].

    They are infinite if bounding boxes are farther apart than ``reach``, or where ``is_same`` [m, n] is False.
    """
    low = lines.min(axis=1)[:, None]
    high = lines.max(axis=1)[:, None]
    truth_low = truth.min(axis=1)[None]
    truth_high = truth.max(axis=1)[None]
    gap = np.maximum(np.maximum(low - truth_high, truth_low - high), 0)
    distances = np.full((len(lines), len(truth)), np.inf)
    for i, j in zip(*np.nonzero(is_same & (np.linalg.norm(gap, axis=-1) <= reach)), strict=True):
        distances[i, j] = chamfer_distance(lines[i], truth[j])
    return distances


def chamfer_distance(line: np.ndarray, other: np.ndarray) -> float:
    """Return the mean distance of the points of a line [P, 2] to the nearest of the other, averaged over both ways."""
    # scipy.spatial is slow to import, and it is not needed before the first evaluation.
    from scipy.spatial.distance import cdist

    between = cdist(line, other)
    return float((between.min(axis=1).mean() + between.min(axis=0).mean()) / 2)


def _resample_all(lines: Sequence[np.ndarray], num_points: int) -> np.ndarray:
    """Return the lines resampled to points evenly spaced by length, [n, num_points, 2]."""
    return np.array([resample(line[:, :2], num_points) for line in lines]).reshape(-1, num_points, 2)
