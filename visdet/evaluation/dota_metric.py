"""Average precision of turned boxes, as DOTA defines it."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from visdet.checks.arguments import also_takes
from visdet.errors import InvalidInputError
from visdet.registry import METRICS, OPS
from visdet.structures.coco_json import corners_of
from visdet.structures.rotated_boxes import boxes_to_polygons

from .coco_metric import CocoMetric, Iou
from .precision_recall import Found, report_of

_IOU_OF_CURVES = 0.5
_SHOWN = (0.5, 0.75)


@METRICS.register_module()
class DOTAMetric(CocoMetric):
    """DOTA's AP of turned boxes: ``dota/mAP``, the mean over classes and IoU thresholds, ``dota/AP50``, ``dota/AP75``.

    In the order of their scores over all images, detections of a class are right if the IoU of their polygon with that
    of the true box which they overlap most is above the threshold, and no earlier one has taken that. Those on a
    difficult box (``ignored_instances``, or ``ignore`` in the file) do not count. A class without true boxes does not
    count, and a value without any is -1.

    ``classwise_results`` and ``curve_report`` are those of :class:`CocoMetric`, with ``mAP``, ``AP50`` and ``AP75``.

    Args:
        ann_file: the COCO JSON file with the ground truth, whose annotations have a ``segmentation`` of four points.
            ``None`` takes the ground truth from the data samples. That of a CocoDataset with ``box_type='rbox'`` in
            ``test_mode`` gives the same values.
        iou_thrs: IoU thresholds to average over, each of which is also returned. The default is 0.50, 0.55, .. 0.95, of
            which 0.50 and 0.75 are returned.
        eval_mode: the AP is the mean of the greatest precision at eleven recalls (``'11points'``), or the area below
            that over the recall (``'area'``).
        classwise: log a table of the AP of each class, and also return it as ``dota/mAP/<class>``.
        backend_args, collect_device, prefix: see :class:`CocoMetric`.

    Raises:
        FileNotFoundError: ``ann_file`` does not exist.
        ValueError: as of :class:`CocoMetric`, or an annotation has no four corners.

    Source: the values are those of DOTA_devkit's evaluation of task 1; the name and the keywords are mmrotate's, which
    counts an IoU equal to the threshold, too.
    """

    default_prefix = "dota"

    @also_takes(
        metric="mAP",
        predict_box_type="rbox",
        format_only=False,
        outfile_prefix=None,
        merge_patches=False,
        scale_ranges=None,
        proposal_nums=...,
    )
    def __init__(
        self,
        ann_file: str | None = None,
        iou_thrs: Iou | Sequence[Iou] | None = None,
        eval_mode: Literal["11points", "area"] = "11points",
        classwise: bool = False,
        backend_args: dict | None = None,
        collect_device: str = "cpu",
        prefix: str | None = None,
    ) -> None:
        super().__init__(
            ann_file,
            classwise=classwise,
            iou_thrs=iou_thrs,
            backend_args=backend_args,
            collect_device=collect_device,
            prefix=prefix,
        )
        self.eval_mode = eval_mode
        self._shown = {f"AP{100 * iou:.3g}": iou for iou in (_SHOWN if iou_thrs is None else self.iou_thrs)}

    @property
    def metric_names(self) -> list[str]:
        """The names of the metrics without the prefix, where ``*`` is the name of a class."""
        return ["mAP", *self._shown, *(["mAP/*"] if self.classwise else [])]

    def _predicted_boxes(self, bboxes: torch.Tensor) -> np.ndarray:
        return boxes_to_polygons(bboxes.detach().double().cpu()).flatten(1).numpy()

    def _true_boxes(self, instances: Any, scale: np.ndarray) -> tuple[list[list[float]], Sequence[float]]:
        if "polygons" in instances:
            polygons = instances["polygons"].cpu().numpy()
        else:
            polygons = boxes_to_polygons(instances["bboxes"].double().cpu()).numpy() / scale
        return polygons.reshape(-1, 8).tolist(), [0.0] * len(polygons)

    def _box_of(self, annotation: dict) -> list[float]:
        corners = corners_of(annotation)
        if corners is None:
            raise InvalidInputError(
                f"DOTAMetric: an annotation of {self._ann_file} has no segmentation of four points: {annotation!r:.300}"
            )
        return corners

    def _metrics_of_class(self, row: dict[str, Any]) -> dict[str, float]:
        return {f"mAP/{row['name']}": row["mAP"]}

    def _measured(self, results: list[dict], truth: list[dict], classes: Sequence[str]) -> dict[str, float]:
        images = self._compared(results, truth)
        frames = []
        for image in images:
            overlap = image.closeness()
            closeness = np.where(overlap >= _IOU_OF_CURVES, overlap, -np.inf)
            frames.append(Found(image.labels, image.predicted, image.scores, closeness.copy, image.is_crowd))
        self.curve_report = report_of(frames, classes, f"rotated IoU {_IOU_OF_CURVES}")
        precisions = np.full((len(self.iou_thrs), len(classes)), np.nan)
        for label in range(len(classes)):
            precisions[:, label] = self._precisions(images, label)
        for label, name in enumerate(classes):
            number = self.curve_report.classes[name]["num_truths"]
            values = self._values(precisions[:, label : label + 1])
            self.classwise_results.append({"name": name, "num_boxes": number, **values})
        return self._values(precisions)

    def _values(self, precisions: np.ndarray) -> dict[str, float]:
        """Return the metrics of APs [thresholds, classes] by name."""
        values = {"mAP": _mean(precisions)}
        for name, iou in self._shown.items():
            values[name] = _mean(precisions[np.isclose(self.iou_thrs, iou)])
        return values

    def _compared(self, results: list[dict], truth: list[dict]) -> list[Found]:
        """Return the images, in which closeness is the IoU."""
        overlaps = OPS.get("box_iou_quadri")
        truth_of_image: list[list[dict]] = [[] for _ in results]
        for row in truth:
            truth_of_image[row["image_id"]].append(row)
        images = []
        for result, rows in zip(results, truth_of_image, strict=True):
            polygons = torch.tensor([row["bbox"] for row in rows], dtype=torch.float64).reshape(-1, 8)
            overlap = overlaps(torch.from_numpy(result["bboxes"]), polygons).numpy()
            labels = np.array([row["category_id"] for row in rows], int)
            is_difficult = np.array([row["iscrowd"] for row in rows], bool)
            images.append(Found(labels, result["labels"], result["scores"], overlap.copy, is_difficult))
        return images

    def _precisions(self, images: Sequence[Found], label: int) -> list[float]:
        """Return the AP of a class at each threshold, NaN if it has no true boxes."""
        scores, best, taken, difficult = [np.zeros(0)], [np.zeros(0)], [np.zeros(0, int)], [np.zeros(0, bool)]
        num_before = 0
        for image in images:
            rows, columns = image.predicted == label, np.flatnonzero(image.labels == label)
            difficult.append(image.is_crowd[columns])
            overlap = image.closeness()[rows][:, columns]
            overlap = np.column_stack([np.zeros(len(overlap)), overlap])  # with none
            scores.append(image.scores[rows])
            best.append(overlap.max(axis=1))
            taken.append(num_before + overlap.argmax(axis=1) - 1)
            num_before += len(columns)
        order = np.argsort(-np.concatenate(scores), kind="stable")
        ious, truths = np.concatenate(best)[order], np.concatenate(taken)[order]
        is_difficult = np.concatenate(difficult)
        num_truths = np.count_nonzero(~is_difficult)
        if not num_truths:
            return [np.nan] * len(self.iou_thrs)
        found = []
        for iou in self.iou_thrs:
            hits = np.flatnonzero(ious > iou)
            is_right = np.zeros(len(ious), bool)
            is_right[hits[np.unique(truths[hits], return_index=True)[1]]] = True
            counts = np.ones(len(ious), bool)
            counts[hits] = ~is_difficult[truths[hits]]
            right = np.cumsum(is_right[counts])
            precision = right / np.arange(1, len(right) + 1)
            found.append(_average_precision(right / num_truths, precision, self.eval_mode))
        return found


def _average_precision(recall: np.ndarray, precision: np.ndarray, mode: str) -> float:
    """Return the AP of the recalls and precisions [m] of all detections, the highest score first."""
    greatest = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    if mode == "area":
        return float(np.diff(recall, prepend=0) @ greatest[:-1])
    return float(greatest[np.searchsorted(recall, np.arange(0.0, 1.1, 0.1))].mean())


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else -1.0
