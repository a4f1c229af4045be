"""COCO's precision and recall arrays, and the AP and AR computed from them."""

import contextlib
import io
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from visdet.errors import MissingPackageError

# For each library, the classes of the annotation index and of the evaluator, and the function of the IoU.
_BACKENDS = {
    "faster_coco_eval": (
        "faster_coco_eval:COCO",
        "faster_coco_eval:COCOeval_faster",
        "faster_coco_eval:mask.iou",
    ),
    "pycocotools": ("pycocotools.coco:COCO", "pycocotools.cocoeval:COCOeval", "pycocotools.mask:iou"),
}


class Backend(NamedTuple):
    """A library: its classes COCO and COCOeval, and its function of the IoU."""

    index: type
    evaluator: type
    iou: Callable


AREAS = ("all", "s", "m", "l")
MAX_DETS_OF_AP = 100


def import_backend(name: str | None = None) -> Backend:
    """Return the parts of a library.

    Args:
        name: the name of the library. The default is the first one that is installed.

    Raises:
        ImportError: the library is not installed.
    """
    for candidate in [name] if name else _BACKENDS:
        with contextlib.suppress(ImportError):
            return Backend(*map(pkgutil.resolve_name, _BACKENDS[candidate]))
    raise MissingPackageError(f"CocoMetric needs {name or ' or '.join(_BACKENDS)}, which is not installed")


@dataclass(frozen=True)
class BoxEvaluation:
    """COCO's arrays of one evaluation.

    Attributes:
        precision: [IoU thresholds, 101 recalls, classes, areas, max. detections], with -1 where a class has no box.
        recall: [IoU thresholds, classes, areas, max. detections].
        iou_thrs: the IoU thresholds.
        max_dets: the numbers of detections per image that are counted.
    """

    precision: np.ndarray
    recall: np.ndarray
    iou_thrs: np.ndarray
    max_dets: Sequence[int]

    def average_precision(
        self, iou: float | None = None, area: str = "all", label: int | None = None
    ) -> float:
        """Return the AP at 100 detections, or -1 if there is no ground truth.

        Args:
            iou: the IoU threshold. The default is the mean over all thresholds.
            area: one of AREAS.
            label: the class. The default is the mean over all classes.
        """
        values = self.precision[..., AREAS.index(area), self.max_dets.index(MAX_DETS_OF_AP)]
        values = values if iou is None else values[np.isclose(self.iou_thrs, iou)]
        return mean_of_defined(values if label is None else values[..., label])

    def average_recall(self, max_dets: int, area: str = "all") -> float:
        """Return the AR over all thresholds and classes with ``max_dets`` detections per image."""
        return mean_of_defined(self.recall[..., AREAS.index(area), self.max_dets.index(max_dets)])


def mean_of_defined(values: np.ndarray) -> float:
    """Return the mean of the values that are not -1, or -1 if all are."""
    defined = values[values > -1]
    return float(defined.mean()) if defined.size else -1.0


def detected(result: dict[str, Any]) -> list[dict]:
    """Return the boxes that are found in the image ``img_id`` in COCO's result format, with labels as category ids."""
    columns = (result[key].tolist() for key in ("bboxes", "scores", "labels"))
    return [
        {"image_id": result["img_id"], "category_id": label, "bbox": box, "score": score}
        for box, score, label in zip(*columns, strict=True)
    ]


def evaluate_boxes(
    truth: Sequence[Sequence[dict]],
    results: Sequence[dict[str, Any]],
    num_classes: int,
    iou_thrs: np.ndarray,
    max_dets: Iterable[int],
    backend: Backend,
) -> BoxEvaluation:
    """Match detections to ground truth as COCO does.

    The id of an image is its position among the results, since several data sets may use the same ids.

    Args:
        truth: for each image its annotations (``category_id``, ``bbox`` [x, y, width, height], ``area``, ``iscrowd``)
            in COCO's form, whose categories are labels.
        results: for each image the ``bboxes`` [n, 4], ``scores`` [n] and ``labels`` [n] that are found.
        num_classes: the number of labels.
        iou_thrs: the IoU thresholds.
        max_dets: the numbers of detections per image to evaluate. 100 is always added.
        backend: the result of :func:`import_backend`.
    """
    image_ids = list(range(len(results)))
    images = [{"id": number} for number in image_ids]
    annotations: list[dict] = []
    boxes: list[dict] = []
    for number, (true, result) in enumerate(zip(truth, results, strict=True)):
        annotations += [{**row, "image_id": number} for row in true]
        boxes += detected({**result, "img_id": number})
    for row in boxes:
        _, _, width, height = row["bbox"]
        row["area"] = width * height
        row["iscrowd"] = 0
    labels = list(range(num_classes))
    categories = [{"id": label, "name": str(label)} for label in labels]
    max_dets = sorted({MAX_DETS_OF_AP, *max_dets})
    with contextlib.redirect_stdout(io.StringIO()):  # COCO's code prints its progress.
        indexes = []
        for rows in (annotations, boxes):
            for number, row in enumerate(
                rows, start=1
            ):  # A match with annotation 0 is none for the libraries.
                row["id"] = number
            index = backend.index()
            index.dataset = {"images": images, "annotations": rows, "categories": categories}
            index.createIndex()
            indexes.append(index)
        evaluator = backend.evaluator(*indexes, "bbox")
        parameters = evaluator.params
        parameters.imgIds = image_ids
        parameters.catIds = labels
        parameters.iouThrs = iou_thrs
        parameters.maxDets = max_dets
        evaluator.evaluate()
        evaluator.accumulate()
    shape = (len(iou_thrs), len(parameters.recThrs), num_classes, len(AREAS), len(max_dets))
    arrays = evaluator.eval
    precision = np.asarray(arrays["precision"]).reshape(shape)
    recall = np.asarray(arrays["recall"]).reshape(shape[:1] + shape[2:])
    return BoxEvaluation(precision, recall, iou_thrs, max_dets)
