"""nuScenes' detection metrics, which are mAP over centre distances, five true-positive errors and NDS."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from visdet.registry import METRICS

from .detection_curves import TP_ERRORS, average_precision, closeness_of, match_frames, mean_errors
from .driving_metric import DrivingBoxMetric, Objects, chosen, logged, mean_of
from .precision_recall import Found, report_of

_ERROR_NAMES = {
    "trans_err": "mATE",
    "scale_err": "mASE",
    "orient_err": "mAOE",
    "vel_err": "mAVE",
    "attr_err": "mAAE",
}
# The errors that are not defined for a class.
_UNDEFINED = {"traffic_cone": ("orient_err", "vel_err", "attr_err"), "barrier": ("vel_err", "attr_err")}
# The attributes of a class when it stands and when it moves.
_VEHICLE = ("vehicle.parked", "vehicle.moving")
_CYCLE = ("cycle.without_rider", "cycle.with_rider")
_ATTRIBUTES = {
    "car": _VEHICLE,
    "truck": _VEHICLE,
    "trailer": _VEHICLE,
    "construction_vehicle": _VEHICLE,
    "bus": ("vehicle.stopped", "vehicle.moving"),
    "bicycle": _CYCLE,
    "motorcycle": _CYCLE,
    "pedestrian": ("pedestrian.standing", "pedestrian.moving"),
}
_DISTANCES = (0.5, 1.0, 2.0, 4.0)
_TP_DISTANCE = 2.0


@METRICS.register_module()
class NuScenesMetric(DrivingBoxMetric):
    """mAP over centre distances of 0.5, 1, 2 and 4 m, the true-positive errors at 2 m, and the detection score.

    ``NDS_no_attr = (5 mAP + sum of max(0, 1 - e)) / 9`` over the errors e of translation, scale, orientation and
    velocity. ``NDS`` also includes the attribute error and is divided by 10. It is returned only if the frames have
    ``gt_attributes``. Predicted attributes follow from the class and the speed, as in published results.

    Ground truth: ``gt_bboxes_3d`` [n, 9], ``gt_labels_3d``, ``token``, ``T_global`` and, for the distance to the
    vehicle, ``ego2global_translation`` of the sample. Predictions: ``boxes_3d`` [m, 9 or 10], ``scores_3d`` and
    ``labels_3d`` of ``pred_instances_3d``. Boxes are compared in the world. Frames without boxes count, too. A class
    without boxes has AP 0.

    Args:
        classes: names of the labels. The default is those of the data set.
        class_range: the distance up to which boxes of a class count, or one for all.
        prefix, collect_device: as in mmengine's BaseMetric.

    Raises:
        ValueError: a frame has no ground truth, or a class has no range.

    Source: matching, curves and errors are those of nuscenes-devkit (detection_cvpr_2019). Difference: bicycles in
    racks are not left out, because info files do not mark them.
    """

    default_prefix = "NuScenes"
    metric_names = ("mAP", "NDS", "NDS_no_attr", *_ERROR_NAMES.values(), "*_AP")

    true_keys = ("gt_bboxes_3d",)

    def read(self, sample: Mapping[str, Any], prediction: Mapping[str, Any]) -> dict[str, Any]:
        """Return the boxes of a frame in the coordinates of the world."""
        attributes = sample.get("gt_attributes")
        known = np.full(len(sample["gt_labels_3d"]), "") if attributes is None else np.asarray(attributes)
        frame = self.boxes_of(sample, prediction, self.best_boxes(prediction), gt_attributes=known)
        frame["has_attributes"] = attributes is not None
        return frame

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        """Return mAP, the errors, NDS, and the AP of each class."""
        with_attributes = bool(results) and all(frame["has_attributes"] for frame in results)
        names = self.names
        reaches = [self.range_of(name) for name in names]
        counted = [self.in_range(frame, reaches) for frame in results]
        rows = {}
        for label, name in enumerate(names):
            frames = [_of_class(frame, label, name) for frame in counted]
            period = np.pi if name == "barrier" else 2 * np.pi
            curves = {distance: match_frames(frames, distance) for distance in _DISTANCES}
            precisions = {f"AP@{distance}": average_precision(curve) for distance, curve in curves.items()}
            matches = curves[_TP_DISTANCE]
            mean = mean_of(list(precisions.values()))
            errors = mean_errors(frames, matches, period) | dict.fromkeys(_UNDEFINED.get(name, ()), np.nan)
            rows[name] = {"boxes": matches.num_truths, **precisions, "AP": mean, **errors}
        means = {}
        for key in ("AP", *TP_ERRORS):
            means[key] = mean_of([row[key] for row in rows.values() if not np.isnan(row[key])])
        summary = _summary(means.pop("AP"), means, with_attributes)
        found = [_found_in_frame(frame) for frame in counted]
        self.curve_report = report_of(found, names, f"centre distance {_TP_DISTANCE:g} m")
        return logged(rows, summary, "AP")


def _of_class(frame: Objects, label: int, name: str) -> Objects:
    """Return the true boxes and the predictions of a class."""
    of_class = chosen(frame, frame["gt_labels"] == label, frame["labels"] == label)
    return {**of_class, "attributes": _attributes(name, of_class["boxes"])}


def _found_in_frame(frame: Objects) -> Found:
    closeness = partial(closeness_of, frame["boxes"], frame["gt_boxes"], _TP_DISTANCE)
    labels = frame["gt_labels"]
    is_crowd = np.zeros_like(labels, dtype=bool)
    return Found(labels, frame["labels"], frame["scores"], closeness, is_crowd)


def _attributes(name: str, boxes: np.ndarray) -> np.ndarray:
    """Return the attribute of each box that follows from its class and its speed."""
    is_moving = np.linalg.norm(boxes[:, 7:9], axis=1) > 0.2
    standing, moving = _ATTRIBUTES.get(name, ("", ""))
    return np.where(is_moving, moving, standing)


def _summary(mean_precision: float, errors: dict[str, float], with_attributes: bool) -> dict[str, float]:
    """Return mAP, the mean errors and the detection scores."""
    # An error that is not defined for any class counts as the worst, as NaN is not above 0.
    scores = {name: max(0.0, 1 - value) for name, value in errors.items()}
    of_attributes = scores.pop("attr_err")
    total = 5 * mean_precision + sum(scores.values())
    summary = {"mAP": mean_precision, "NDS_no_attr": total / 9}
    if with_attributes:
        summary["NDS"] = (total + of_attributes) / 10
    for name, label in _ERROR_NAMES.items():
        if with_attributes or name != "attr_err":
            summary[label] = errors[name]
    return summary
