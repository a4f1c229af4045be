"""Precision over recall of each class, the score of the best F1, and confusion matrices, as numbers and pictures."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
        record: dict[str, Any] = {"matched_by": self.matched_by, "classes": self.classes}
        if self.confusion is not None:
            labels = [*self.classes, _BACKGROUND]
            record["confusion_matrix"] = {"labels": labels, "true_by_predicted": self.confusion.tolist()}
        return record

    def draw(self, folder: str | Path, name: str) -> list[str]:
        """Write ``<name>_precision_recall.png`` and, if there is one, ``<name>_confusion_matrix.png``."""
        files = [str(Path(folder, f"{name}_precision_recall.png"))]
        _draw_curves(self.classes, self.matched_by, files[0])
        if self.confusion is not None:
            files.append(str(Path(folder, f"{name}_confusion_matrix.png")))
            _draw_confusion(self.confusion, [*self.classes, _BACKGROUND], files[1])
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
    right, counts = np.cumsum(np.bincount(group, is_right)), np.cumsum(np.bincount(group))
    precision = right / counts
    recall = right / max(num_truths, 1)
    f1 = 2 * right / (counts + num_truths)
    best = int(f1.argmax()) if len(f1) and f1.max() > 0 else None
    record: dict[str, Any] = dict.fromkeys(("best_threshold", "best_f1", "best_precision", "best_recall"))
    shown = np.unique(np.linspace(0, max(len(scores) - 1, 0), _MOST_POINTS).round().astype(int))[
        : len(scores)
    ]
    if best is not None:
        below = scores[best + 1] if best + 1 < len(scores) else 0.0
        record = {
            "best_threshold": float((scores[best] + below) / 2),
            "best_f1": float(f1[best]),
            "best_precision": float(precision[best]),
            "best_recall": float(recall[best]),
        }
        shown = np.union1d(shown, [best])
    points = {"scores": scores, "precision": precision, "recall": recall}
    return (
        {"num_truths": int(num_truths)} | record | {name: row[shown].tolist() for name, row in points.items()}
    )


def confusion_matrix(
    num_classes: int, matches: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Return how often each true class was predicted as each class, int64 [num_classes + 1, num_classes + 1].

    The last row counts predictions without a true object, and the last column true objects without a prediction.

    Args:
        num_classes: number of classes.
        matches: for each frame the labels of the true objects [n], the labels of the predictions [m], and the row of
            the true object that each prediction is matched with [m], or -1 for none. Classes need not agree.
    """
    counts = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)
    for truth, predicted, taken in matches:
        found = taken >= 0
        np.add.at(counts, (truth[taken[found]], predicted[found]), 1)
        np.add.at(counts[num_classes], predicted[~found], 1)
        missed = np.setdiff1d(np.arange(len(truth)), taken[found])
        np.add.at(counts[:, num_classes], truth[missed], 1)
    return counts


def box_report(
    truth: Iterable[Mapping[str, Any]],
    detections: Iterable[Mapping[str, Any]],
    image_ids: Iterable[Any],
    classes: Sequence[str],
) -> CurveReport:
    """Return the report of boxes in images, which are matched as COCO does at IoU 0.5.

    The confusion matrix counts the detections above the best threshold of their class, and matches them with the true
    box of the greatest IoU whatever its class. Detections on crowd regions do not count.

    Args:
        truth, detections: see :func:`visdet.evaluation.box_evaluation.evaluate_boxes`.
        image_ids: the ids of the images that were evaluated.
        classes: the names of the labels.
    """
    images = _by_image(truth, detections, image_ids, len(classes))
    scores: list[list[np.ndarray]] = [[np.zeros(0)] for _ in classes]
    right: list[list[np.ndarray]] = [[np.zeros(0)] for _ in classes]
    num_truths = np.zeros(len(classes), dtype=int)
    for image in images:
        np.add.at(num_truths, image.labels[~image.is_crowd], 1)
        for label in np.unique(image.predicted):
            rows = np.flatnonzero(image.predicted == label)
            rows = rows[np.argsort(-image.scores[rows], kind="stable")][:_MOST_BOXES]
            taken = _take_best(image.iou[rows] * (image.labels == label), image.is_crowd)
            counted = taken > -2
            scores[label].append(image.scores[rows][counted])
            right[label].append(taken[counted] >= 0)
    curves = {
        name: score_curve(np.concatenate(scores[label]), np.concatenate(right[label]), num_truths[label])
        for label, name in enumerate(classes)
    }
    least = np.array(
        [np.inf if c["best_threshold"] is None else c["best_threshold"] for c in curves.values()]
    )
    confusion = confusion_matrix(len(classes), (_confident_matches(image, least) for image in images))
    return CurveReport(f"IoU {_IOU}", curves, confusion)


@dataclass(frozen=True)
class _ImageBoxes:
    labels: np.ndarray  # [n] of the true boxes
    is_crowd: np.ndarray  # [n]
    predicted: np.ndarray  # [m] labels of the detections
    scores: np.ndarray  # [m]
    iou: np.ndarray  # [m, n]


def _by_image(
    truth: Iterable[Mapping], detections: Iterable[Mapping], image_ids: Iterable, num_classes: int
) -> list[_ImageBoxes]:
    of_image: dict[Any, tuple[list, list]] = defaultdict(lambda: ([], []))
    for kind, rows in enumerate((truth, detections)):
        for row in rows:
            if row["category_id"] < num_classes:  # COCO's code leaves others out, too.
                of_image[row["image_id"]][kind].append(row)
    images = []
    for image_id in dict.fromkeys(image_ids):
        true, found = of_image[image_id]
        crowd = np.array([bool(row["iscrowd"]) for row in true], dtype=bool)
        boxes, true_boxes = (
            np.array([row["bbox"] for row in rows], float).reshape(-1, 4) for rows in (found, true)
        )
        labels = [np.array([row["category_id"] for row in rows], int) for rows in (found, true)]
        scores = np.array([row["score"] for row in found], float)
        images.append(_ImageBoxes(labels[1], crowd, labels[0], scores, _iou(boxes, true_boxes, crowd)))
    return images


def _iou(boxes: np.ndarray, truth: np.ndarray, is_crowd: np.ndarray) -> np.ndarray:
    """Return the IoU [m, n] of boxes (x, y, width, height), which is the covered part of the box for a crowd."""
    low = np.maximum(boxes[:, None, :2], truth[None, :, :2])
    high = np.minimum(boxes[:, None, :2] + boxes[:, None, 2:], truth[None, :, :2] + truth[None, :, 2:])
    common = np.maximum(high - low, 0).prod(axis=-1)
    areas, true_areas = boxes[:, 2:].prod(axis=1)[:, None], truth[:, 2:].prod(axis=1)[None]
    union = np.where(is_crowd[None], areas, areas + true_areas - common)
    return np.divide(common, union, out=np.zeros_like(common), where=union > 0)


def _take_best(iou: np.ndarray, is_crowd: np.ndarray) -> np.ndarray:
    """Return the true box that each detection is matched with, the highest score first; -1 is none, -2 a crowd."""
    on_crowd = (np.where(is_crowd[None], iou, 0.0) >= _IOU).any(axis=1)
    taken = np.where(on_crowd, -2, -1)
    free = np.where(is_crowd[None], 0.0, iou)
    for row in np.flatnonzero((free >= _IOU).any(axis=1)):
        best = int(free[row].argmax())
        if free[row, best] >= _IOU:
            taken[row] = best
            free[:, best] = 0
    return taken


def _confident_matches(image: _ImageBoxes, least: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = np.flatnonzero(image.scores >= least[image.predicted])
    rows = rows[np.argsort(-image.scores[rows], kind="stable")]
    taken = _take_best(image.iou[rows], image.is_crowd)
    number = np.cumsum(~image.is_crowd) - 1  # of each true box without the crowds
    matched = np.array([number[row] if row >= 0 else -1 for row in taken], int)
    return image.labels[~image.is_crowd], image.predicted[rows][taken > -2], matched[taken > -2]


def _draw_curves(classes: Mapping[str, Mapping[str, Any]], matched_by: str, path: str) -> None:
    # matplotlib is slow to import, and it is not needed before the first picture.
    from matplotlib.figure import Figure

    names, font = legible(*classes)
    figure = Figure(figsize=(7, 6), layout="constrained")
    axis = figure.subplots()
    for name, curve in zip(names, classes.values(), strict=True):
        if curve["best_threshold"] is None:
            continue
        (line,) = axis.plot(
            curve["recall"],
            curve["precision"],
            linewidth=1.2,
            label=f"{name}: F1 {curve['best_f1']:.2f} above {curve['best_threshold']:.2f}",
        )
        axis.plot(curve["best_recall"], curve["best_precision"], "o", color=line.get_color())
    axis.set(
        xlim=(0, 1.01), ylim=(0, 1.01), xlabel="recall", ylabel="precision", title=f"matched by {matched_by}"
    )
    axis.grid(alpha=0.3)
    if axis.lines and len(names) <= 40:
        axis.legend(prop=_font(names, font), loc="lower left")
    with written_whole(path) as partial:
        figure.savefig(partial, dpi=110)


def _draw_confusion(counts: np.ndarray, labels: Sequence[str], path: str) -> None:
    from matplotlib.figure import Figure

    shown, font = legible(*labels)
    size = max(5.0, min(0.5 * len(labels) + 2, 24))
    figure = Figure(figsize=(size, size), layout="constrained")
    axis = figure.subplots()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    properties = _font(shown, font)
    places = range(len(labels))
    axis.set_xticks(places, shown, rotation=90, fontproperties=properties)
    axis.set_yticks(places, shown, fontproperties=properties)
    axis.set(xlabel="predicted", ylabel="true", title="counts; colours are shares of the true class")
    if len(labels) <= 40:
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
