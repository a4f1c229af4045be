"""Precision, recall and errors of boxes matched by the distance of their centres, as nuScenes defines them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from visdet.structures.poses import wrap_angle

__all__ = ["TP_ERRORS", "Boxes", "Curve", "accumulate", "average_precision", "tp_error"]

TP_ERRORS = ("trans_err", "scale_err", "orient_err", "vel_err", "attr_err")
_RECALLS = np.linspace(0, 1, 101)


@dataclass
class Boxes:
    """Boxes of one class in one frame.

    values: [n, 9], x, y, z, length, width, height, yaw, vx, vy. scores [n], of predictions. attributes [n], if known.
    """

    values: np.ndarray
    scores: np.ndarray | None = None
    attributes: np.ndarray | None = None


@dataclass
class Curve:
    """Precision, confidence and running errors [101] of one class at recalls 0, 0.01 … 1."""

    precision: np.ndarray
    confidence: np.ndarray
    errors: dict[str, np.ndarray]

    @property
    def max_recall_index(self) -> int:
        """The last recall that is reached."""
        reached = np.flatnonzero(self.confidence)
        return int(reached[-1]) if len(reached) else 0


def accumulate(
    truths: Sequence[Boxes], predictions: Sequence[Boxes], max_distance: float, yaw_period: float = 2 * np.pi
) -> Curve:
    """Return the curve of one class: ``truths[i]`` and ``predictions[i]`` belong to frame i.

    In each frame the predictions, best first, take the nearest box that is still free, if it is nearer than
    ``max_distance`` (m, in x and y).

    Source: the same numbers as ``accumulate`` of nuscenes-devkit, where equal scores count in reversed order.
    """
    num_truths = sum(len(frame.values) for frame in truths)
    matches = [
        _match(truth.values, predicted, max_distance)
        for truth, predicted in zip(truths, predictions, strict=True)
    ]
    scores = np.concatenate([np.zeros(0), *(frame.scores for frame in predictions)])
    taken = np.concatenate([np.zeros(0, np.int64), *matches])
    if num_truths == 0 or not (taken >= 0).any():
        return Curve(np.zeros(101), np.zeros(101), {name: np.ones(101) for name in TP_ERRORS})
    frame_of = np.repeat(np.arange(len(predictions)), [len(frame.values) for frame in predictions])
    row_of = np.concatenate([np.zeros(0, np.int64), *(np.arange(len(frame.values)) for frame in predictions)])
    order = np.argsort(scores, kind="stable")[::-1]
    is_match = taken[order] >= 0
    true_positives = np.cumsum(is_match)
    precision = true_positives / np.arange(1, len(order) + 1)
    recall = true_positives / num_truths
    confidence = np.interp(_RECALLS, recall, scores[order], right=0)
    matched = order[is_match]
    errors = _errors(truths, predictions, frame_of[matched], row_of[matched], taken[matched], yaw_period)
    running = {
        name: np.interp(confidence[::-1], scores[matched][::-1], _running_mean(values)[::-1])[::-1]
        for name, values in errors.items()
    }
    return Curve(np.interp(_RECALLS, recall, precision, right=0), confidence, running)


def _match(truth: np.ndarray, predicted: Boxes, max_distance: float) -> np.ndarray:
    """Return the row of ``truth`` that each prediction takes, -1 for none."""
    taken = np.full(len(predicted.values), -1, dtype=np.int64)
    if not len(truth) or not len(predicted.values):
        return taken
    distances = np.linalg.norm(predicted.values[:, None, :2] - truth[None, :, :2], axis=-1)
    order = np.argsort(predicted.scores, kind="stable")[::-1]
    for row in order[distances.min(axis=1)[order] < max_distance]:
        nearest = int(distances[row].argmin())
        if distances[row, nearest] < max_distance:
            taken[row] = nearest
            distances[:, nearest] = np.inf
    return taken


def _errors(truths, predictions, frames, rows, truth_rows, yaw_period: float) -> dict[str, np.ndarray]:
    """Return the errors [m] of the matches, in the order given."""
    predicted = np.array([predictions[f].values[r] for f, r in zip(frames, rows, strict=True)])
    truth = np.array([truths[f].values[r] for f, r in zip(frames, truth_rows, strict=True)])
    common = np.minimum(predicted[:, 3:6], truth[:, 3:6]).prod(axis=1)
    union = predicted[:, 3:6].prod(axis=1) + truth[:, 3:6].prod(axis=1) - common
    turn = truth[:, 6] - predicted[:, 6]
    turn = turn - yaw_period * np.floor(turn / yaw_period + 0.5)
    attributes = np.array(
        [
            _attribute_error(truths[f], t, predictions[f], r)
            for f, t, r in zip(frames, truth_rows, rows, strict=True)
        ]
    )
    return {
        "trans_err": np.linalg.norm(predicted[:, :2] - truth[:, :2], axis=1),
        "scale_err": 1 - common / union,
        "orient_err": np.abs(wrap_angle(turn)),
        "vel_err": np.linalg.norm(predicted[:, 7:9] - truth[:, 7:9], axis=1),
        "attr_err": attributes,
    }


def _attribute_error(truth: Boxes, truth_row: int, predicted: Boxes, row: int) -> float:
    if truth.attributes is None or predicted.attributes is None or truth.attributes[truth_row] == "":
        return np.nan
    return float(truth.attributes[truth_row] != predicted.attributes[row])


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean of the values up to each, leaving out NaN; 1 where all are NaN."""
    known = ~np.isnan(values)
    if not known.any():
        return np.ones(len(values))
    counts = np.cumsum(known)
    return np.divide(np.nancumsum(values), counts, out=np.zeros(len(values)), where=counts != 0)


def average_precision(curve: Curve, min_recall: float = 0.1, min_precision: float = 0.1) -> float:
    """Return the mean precision above both minima, scaled to 0..1."""
    precision = curve.precision[round(100 * min_recall) + 1 :] - min_precision
    return float(np.maximum(precision, 0).mean() / (1 - min_precision))


def tp_error(curve: Curve, name: str, min_recall: float = 0.1) -> float:
    """Return the mean of a running error over the recalls from ``min_recall`` to the last reached, 1 without one."""
    first, last = round(100 * min_recall) + 1, curve.max_recall_index
    return float(curve.errors[name][first : last + 1].mean()) if last >= first else 1.0
