"""Precision, recall and errors of boxes that are matched by the distance of their centres, as in nuScenes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .precision_recall import joined, take_closest

TP_ERRORS = ("trans_err", "scale_err", "orient_err", "vel_err", "attr_err")
_RECALLS = np.linspace(0, 1, 101)
_FIRST, _LEAST_PRECISION = (
    11,
    0.1,
)  # the position of the least recall that counts, and the precision above which it does
# Of one class in one frame: the true boxes ``gt_boxes`` [n, 9] and the predictions ``boxes`` [m, 9], which are x, y, z,
# length, width, height, yaw, vx and vy, the ``scores`` [m] of these and, for errors alone, ``gt_attributes`` [n] and
# ``attributes`` [m], which are empty texts where they are not known. For matching alone, x and y suffice.
Frame = Mapping[str, np.ndarray]


@dataclass
class Matches:
    """The matches of the predictions of one class over all frames, the highest score first.

    Attributes:
        rows, truth_rows: [m], the places of the prediction and of the true box of each match among those of all frames.
        scores: [m], the scores of these predictions.
        precision, confidence: [101], at the recalls 0, 0.01, …, 1.
        num_truths: number of true boxes.
        num_false: number of predictions without a match.
    """

    rows: np.ndarray
    truth_rows: np.ndarray
    scores: np.ndarray
    precision: np.ndarray
    confidence: np.ndarray
    num_truths: int
    num_false: int

    def running_mean(self, values: np.ndarray, known: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the means [101] of the values [m] over the matches up to each recall.

        Args:
            values: [m], one per match.
            known: selects the matches that count.
        """
        means = _running_mean(values[known])
        scores = self.scores[known]
        return np.interp(self.confidence[::-1], scores[::-1], means[::-1])[::-1]

    def mean_error(
        self, values: np.ndarray, known: np.ndarray | slice = slice(None), unreached: float = 1.0
    ) -> float:
        """Return the mean of :meth:`running_mean` over the recalls above 0.1 up to the highest that is reached.

        If there are none, the result is ``unreached``.
        """
        end = 1 + np.flatnonzero(self.confidence).max(initial=0)
        return float(self.running_mean(values, known)[_FIRST:end].mean()) if end > _FIRST else unreached


def match_frames(frames: Sequence[Frame], max_distance: float) -> Matches:
    """Return the matches of the predictions and the true boxes of one class.

    In each frame the predictions, the highest score first, are matched with the nearest true box that is still free, if
    it is nearer than ``max_distance``.

    Args:
        frames: the boxes of each frame.
        max_distance: the greatest distance of a match in x and y, in metres.

    Source: the values are those of ``accumulate`` of nuscenes-devkit, where equal scores count in reversed order.
    """
    num_truths = 0
    columns = [(np.zeros(0), np.zeros(0, np.int64))]
    for frame in frames:
        truths = take_nearest(frame, max_distance)
        columns.append((frame["scores"], np.where(truths < 0, -1, num_truths + truths)))
        num_truths += len(frame["gt_boxes"])
    scores, taken = joined(columns)
    order = np.argsort(scores, kind="stable")[::-1]
    is_match = taken[order] >= 0
    count = len(order)
    precision = np.zeros(101)
    confidence = precision
    if is_match.any():
        true_positives = np.cumsum(is_match)
        recall = true_positives / num_truths
        precision = np.interp(_RECALLS, recall, true_positives / np.arange(1, count + 1), right=0)
        confidence = np.interp(_RECALLS, recall, scores[order], right=0)
    matched = order[is_match]
    return Matches(
        rows=matched,
        truth_rows=taken[matched],
        scores=scores[matched],
        precision=precision,
        confidence=confidence,
        num_truths=num_truths,
        num_false=count - len(matched),
    )


def take_nearest(frame: Frame, max_distance: float, allowed: np.ndarray | None = None) -> np.ndarray:
    """Return the row of the true box that each prediction is matched with, int64 [m], or -1 for no match.

    Args:
        frame: the boxes.
        max_distance: the greatest distance of a match in x and y, in metres.
        allowed: bool [m, n]. A prediction whose nearest free box is not allowed gets no match, and the box stays free.
    """
    order = np.argsort(frame["scores"], kind="stable")[::-1]
    closeness = closeness_of(frame["boxes"], frame["gt_boxes"], max_distance)
    taken = np.empty_like(order)
    taken[order] = take_closest(closeness[order], None if allowed is None else allowed[order])
    return taken


def closeness_of(boxes: np.ndarray, truth: np.ndarray, max_distance: float) -> np.ndarray:
    """Return the negative distances in x and y [m, n], or -inf if they are not below ``max_distance``.

    Args:
        boxes: [m, >= 2]. truth: [n, >= 2]. max_distance: the greatest distance in metres.
    """
    distances = np.linalg.norm(boxes[:, None, :2] - truth[None, :, :2], axis=-1)
    return np.where(distances < max_distance, -distances, -np.inf)


def mean_errors(frames: Sequence[Frame], matches: Matches, yaw_period: float) -> dict[str, float]:
    """Return :meth:`Matches.mean_error` of each of TP_ERRORS.

    Args:
        frames, matches: those of :func:`match_frames`.
        yaw_period: the period of the yaw, which is pi for boxes without a front.
    """
    if not frames:
        return dict.fromkeys(TP_ERRORS, 1.0)
    errors = errors_of_matches(frames, matches, yaw_period)
    return {name: matches.mean_error(values) for name, values in errors.items()}


def errors_of_matches(
    frames: Sequence[Frame], matches: Matches, yaw_period: float = 2 * np.pi
) -> dict[str, np.ndarray]:
    """Return the errors [m] of the matches by name, in the order of the matches; see :func:`mean_errors`."""

    def matched(key: str, rows: np.ndarray) -> np.ndarray:
        return np.concatenate([frame[key] for frame in frames])[rows]

    rows = matches.rows
    truth_rows = matches.truth_rows
    predicted = matched("boxes", rows)
    truth = matched("gt_boxes", truth_rows)
    sizes = predicted[:, 3:6]
    true_sizes = truth[:, 3:6]
    common = np.minimum(sizes, true_sizes).prod(axis=1)
    union = sizes.prod(axis=1) + true_sizes.prod(axis=1) - common
    turn = truth[:, 6] - predicted[:, 6]
    turn = turn - yaw_period * np.floor(turn / yaw_period + 0.5)  # up to half a period to either side
    attributes = matched("gt_attributes", truth_rows)
    is_other = attributes != matched("attributes", rows)
    return {
        "trans_err": np.linalg.norm(predicted[:, :2] - truth[:, :2], axis=1),
        "scale_err": 1 - common / union,
        "orient_err": np.abs(turn),
        "vel_err": np.linalg.norm(predicted[:, 7:9] - truth[:, 7:9], axis=1),
        "attr_err": np.where(attributes == "", np.nan, is_other),
    }


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Return the running mean of the values without NaN, or 1 everywhere if all values are NaN."""
    known = ~np.isnan(values)
    size = len(values)
    if not known.any():
        return np.ones(size)
    counts = np.cumsum(known)
    return np.divide(np.nancumsum(values), counts, out=np.zeros(size), where=counts != 0)


def average_precision(curve: Matches) -> float:
    """Return the mean of the precision above 0.1 over the recalls above 0.1, scaled to 0..1."""
    precision = curve.precision[_FIRST:] - _LEAST_PRECISION
    return float(np.maximum(precision, 0).mean() / (1 - _LEAST_PRECISION))
