"""Precision over recall of each class, the score of the best F1, and confusion matrices, as numbers and pictures."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visdet.files.writing import written_whole
from visdet.structures.fonts import legible

_MOST_POINTS = 200  # of a curve in the file
_IOU = 0.5
_MOST_BOXES = 100  # of a class in an image, as COCO counts them
_BACKGROUND = "background"


@dataclass(frozen=True)
class CurveReport:
    """What one evaluation says about scores.

    Attributes:
        matched_by: when a prediction is right, such as 'IoU 0.5'.
        classes: the result of :func:`score_curve` for each class.
        confusion: counts [true class, predicted class], whose last row and column are the background, or None.
    """

    matched_by: str
    classes: dict[str, dict[str, Any]]
    confusion: np.ndarray | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report in types that JSON can represent."""
        classes = self.classes
        confusion = self.confusion
        record: dict[str, Any] = {"matched_by": self.matched_by, "classes": classes}
        if confusion is not None:
            labels = [*classes, _BACKGROUND]
            record["confusion_matrix"] = {"labels": labels, "true_by_predicted": confusion.tolist()}
        return record

    def draw(self, folder: str | Path, name: str) -> list[str]:
        """Write ``<name>_precision_recall.png`` and, if there is one, ``<name>_confusion_matrix.png``."""
        classes = self.classes
        confusion = self.confusion
        curves = str(Path(folder, f"{name}_precision_recall.png"))
        files = [curves]
        _draw_curves(classes, self.matched_by, curves)
        if confusion is not None:
            matrix = str(Path(folder, f"{name}_confusion_matrix.png"))
            files.append(matrix)
            _draw_confusion(confusion, [*classes, _BACKGROUND], matrix)
        return files


def score_curve(scores: np.ndarray, is_right: np.ndarray, num_truths: int) -> dict[str, Any]:
    """Return the precision and the recall of the predictions of a class above each score, and the best F1.

    Args:
        scores: [m], the scores of all predictions.
        is_right: [m], whether each of them is matched with a true object of its own.
        num_truths: number of true objects.

    Returns:
        a dict with ``num_truths``; ``best_threshold``, ``best_f1``, ``best_precision`` and ``best_recall``, which are
        None if nothing is right; and ``scores``, ``precision`` and ``recall``, at most 201 points of the curve. The
        threshold is in the middle between the lowest score that belongs to the best F1 and the next one.
    """
    # Predictions of equal scores are above a threshold together.
    negative, group = np.unique(-np.asarray(scores, float), return_inverse=True)
    scores = -negative  # the highest first
    size = len(scores)
    right = np.cumsum(np.bincount(group, is_right))
    counts = np.cumsum(np.bincount(group))
    precision = right / counts
    recall = right / max(num_truths, 1)
    f1 = 2 * right / (counts + num_truths)
    record: dict[str, Any] = dict.fromkeys(("best_threshold", "best_f1", "best_precision", "best_recall"))
    shown = np.unique(np.linspace(0, size - 1, _MOST_POINTS).round().astype(int))[:size]
    if f1.max(initial=0) > 0:
        best = int(f1.argmax())
        following = best + 1
        below = scores[following] if following < size else 0.0
        record = {
            "best_threshold": float((scores[best] + below) / 2),
            "best_f1": float(f1[best]),
            "best_precision": float(precision[best]),
            "best_recall": float(recall[best]),
        }
        shown = np.union1d(shown, [best])
    for name, row in (("scores", scores), ("precision", precision), ("recall", recall)):
        record[name] = row[shown].tolist()
    return {"num_truths": int(num_truths), **record}


@dataclass(frozen=True)
class Found:
    """The true objects and the predictions of one image or frame.

    Attributes:
        labels: [n], the classes of the true objects.
        predicted, scores: [m], the classes and the scores of the predictions.
        closeness: returns [m, n], how close each prediction is to each true object, -inf if they cannot be matched.
        is_crowd: bool [n], true objects that need not be found. Predictions on them do not count.
    """

    labels: np.ndarray
    predicted: np.ndarray
    scores: np.ndarray
    closeness: Callable[[], np.ndarray]
    is_crowd: np.ndarray

    def matches(self, rows: np.ndarray, label: int | None = None) -> np.ndarray:
        """Return the true object [len(rows)] of each of the predictions ``rows``; -1 is none, -2 is a crowd.

        The first prediction takes the closest free object of the class ``label``, or of any class, and so on.
        """
        closeness = self.closeness()[rows]
        never = -np.inf
        if label is not None:
            closeness[:, self.labels != label] = never
        crowds = self.is_crowd
        is_on_crowd = np.isfinite(closeness[:, crowds]).any(axis=1)
        closeness[:, crowds] = never
        taken = take_closest(closeness)
        return np.where((taken < 0) & is_on_crowd, -2, taken)

    def best_first(self, chosen: np.ndarray) -> np.ndarray:
        """Return the rows of those predictions for which the mask ``chosen`` [m] is True, the highest score first."""
        rows = np.flatnonzero(chosen)
        return rows[np.argsort(-self.scores[rows], kind="stable")]


def take_closest(closeness: np.ndarray, is_allowed: np.ndarray | None = None) -> np.ndarray:
    """Return the column that each row of ``closeness`` [m, n] takes, int64 [m], or -1 for none.

    One after another, each row takes the closest column that is still free, unless that is -inf.

    Args:
        closeness: [m, n].
        is_allowed: bool [m, n]. A row whose closest free column is not allowed gets none, and the column stays free.
    """
    taken = np.full(len(closeness), -1, dtype=np.int64)
    free = closeness.copy()
    for row in np.flatnonzero(np.isfinite(closeness).any(axis=1)):
        best = int(free[row].argmax())
        cell = row, best
        if np.isfinite(free[cell]) and (is_allowed is None or is_allowed[cell]):
            taken[row] = best
            free[:, best] = -np.inf
    return taken


def joined(parts: Iterable[tuple[np.ndarray, ...]]) -> Iterator[np.ndarray]:
    """Return the first arrays of all parts as one, then the second ones, and so on."""
    return map(np.concatenate, zip(*parts, strict=True))


def report_of(
    frames: Sequence[Found], classes: Sequence[str], matched_by: str, most_of_class: int | None = None
) -> CurveReport:
    """Return the report of the predictions in frames.

    The confusion matrix counts the predictions above the best threshold of their class, and matches them with the
    closest true object whatever its class.

    Args:
        frames: the frames.
        classes: the names of the labels.
        matched_by: see :class:`CurveReport`.
        most_of_class: the greatest number of predictions of a class in a frame that count for the curves.
    """
    none = (np.zeros(0), np.zeros(0, dtype=bool))
    found: list[list[tuple[np.ndarray, np.ndarray]]] = [
        [none] for _ in classes
    ]  # scores, and which are right
    num_classes = len(classes)
    count_at = np.add.at
    num_truths = np.zeros(num_classes, dtype=int)
    for frame in frames:
        count_at(num_truths, frame.labels[~frame.is_crowd], 1)
        predicted = frame.predicted
        for label in np.unique(predicted):
            rows = frame.best_first(predicted == label)[:most_of_class]
            taken = frame.matches(rows, label)
            counts = taken > -2
            found[label].append((frame.scores[rows][counts], taken[counts] >= 0))
    curves = {}
    for name, of_class, number in zip(classes, found, num_truths, strict=True):
        scores, right = joined(of_class)
        curves[name] = score_curve(scores, right, number)
    # No score is above NaN, which None becomes.
    least = np.array([curve["best_threshold"] for curve in curves.values()], float)
    num_columns = num_classes + 1
    confusion = np.zeros((num_columns, num_columns), dtype=np.int64)
    for frame in frames:
        rows = frame.best_first(frame.scores >= least[frame.predicted])
        taken = frame.matches(rows)
        predicted = frame.predicted[rows]
        labels = frame.labels
        is_matched = taken >= 0
        matched = taken[is_matched]
        is_missed = ~frame.is_crowd
        is_missed[matched] = False
        count_at(confusion, (labels[matched], predicted[is_matched]), 1)
        count_at(confusion[-1], predicted[taken == -1], 1)
        count_at(confusion[:, -1], labels[is_missed], 1)
    return CurveReport(matched_by, curves, confusion)


def box_report(
    truth: Iterable[Sequence[Mapping[str, Any]]],
    results: Iterable[Mapping[str, np.ndarray]],
    classes: Sequence[str],
    iou: Callable,
) -> CurveReport:
    """Return the report of boxes in images, which are matched as COCO does at IoU 0.5.

    Args:
        truth: for each image its annotations (``category_id``, ``bbox`` and ``iscrowd``) in COCO's form, whose
            categories are labels.
        results: for each image the ``bboxes`` [n, 4] (x, y, width, height), ``scores`` [n] and ``labels`` [n] that are
            found.
        classes: the names of the labels. Boxes of others are left out.
        iou: COCO's function, see :class:`visdet.evaluation.box_evaluation.Backend`.
    """
    images = found_in_images(truth, results, len(classes), iou)
    return report_of(images, classes, f"IoU {_IOU}", _MOST_BOXES)


def found_in_images(
    truth: Iterable[Sequence[Mapping[str, Any]]],
    results: Iterable[Mapping[str, np.ndarray]],
    num_classes: int,
    iou: Callable,
    least_iou: float = _IOU,
) -> list[Found]:
    """Return the true boxes and the detections of each image, whose closeness is their IoU.

    Args:
        truth, results, iou: see :func:`box_report`. Boxes may have other numbers than four.
        num_classes: the number of labels. Boxes of others are left out, as COCO's code does.
        least_iou: the least IoU of boxes that can be matched.
    """
    images = []
    for annotations, result in zip(truth, results, strict=True):
        is_counted = result["labels"] < num_classes
        boxes, scores, predicted = (result[key][is_counted] for key in ("bboxes", "scores", "labels"))
        rows = [row for row in annotations if row["category_id"] < num_classes]
        labels, is_crowd, sides = (
            np.array([row[key] for row in rows], dtype)
            for key, dtype in (("category_id", int), ("iscrowd", bool), ("bbox", float))
        )
        true_boxes = sides.reshape(-1, boxes.shape[1])
        overlap = np.reshape(iou(boxes, true_boxes, is_crowd.tolist()), (len(boxes), len(rows)))
        closeness = np.where(overlap >= least_iou, overlap, -np.inf)
        images.append(Found(labels, predicted, scores, closeness.copy, is_crowd))
    return images


def _draw_curves(classes: Mapping[str, Mapping[str, Any]], matched_by: str, path: str) -> None:
    # matplotlib is slow to import, and it is not needed before the first picture.
    from matplotlib.figure import Figure

    names, font = legible(*classes)
    figure = Figure(figsize=(7, 6), layout="constrained")
    axis = figure.subplots()
    for name, curve in zip(names, classes.values(), strict=True):
        threshold = curve["best_threshold"]
        if threshold is None:
            continue
        (line,) = axis.plot(
            curve["recall"],
            curve["precision"],
            linewidth=1.2,
            label=f"{name}: F1 {curve['best_f1']:.2f} above {threshold:.2f}",
        )
        axis.plot(curve["best_recall"], curve["best_precision"], "o", color=line.get_color())
    limits = (0, 1.01)
    axis.set(xlim=limits, ylim=limits, xlabel="recall", ylabel="precision", title=f"matched by {matched_by}")
    axis.grid(alpha=0.3)
    if axis.lines and len(names) <= 40:
        axis.legend(prop=_font(names, font), loc="lower left")
    with written_whole(path) as partial:
        figure.savefig(partial, dpi=110)


def _draw_confusion(counts: np.ndarray, labels: Sequence[str], path: str) -> None:
    from matplotlib.figure import Figure

    shown, font = legible(*labels)
    number = len(labels)
    size = max(5.0, min(0.5 * number + 2, 24))
    figure = Figure(figsize=(size, size), layout="constrained")
    axis = figure.subplots()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    properties = _font(shown, font)
    places = range(number)
    axis.set_xticks(places, shown, rotation=90, fontproperties=properties)
    axis.set_yticks(places, shown, fontproperties=properties)
    axis.set(xlabel="predicted", ylabel="true", title="counts; colours are shares of the true class")
    if number <= 40:
        for row, column in np.argwhere(counts > 0):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axis.text(
                column, row, str(counts[row, column]), ha="center", va="center", color=colour, fontsize=8
            )
    with written_whole(path) as partial:
        figure.savefig(partial, dpi=110)


def _font(names: Sequence[str], file: str) -> Any:
    from matplotlib.font_manager import FontProperties

    return FontProperties(fname=None if all(map(str.isascii, names)) else file, size=8)
