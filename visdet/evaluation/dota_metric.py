"""Average precision of turned boxes, as DOTA defines it."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from visdet.checks.arguments import also_takes
from visdet.errors import InvalidInputError
from visdet.registry import METRICS, OPS
from visdet.structures.coco_json import corners_of
from visdet.structures.rotated_boxes import boxes_to_polygons

from .box_evaluation import mean_of_defined
from .coco_metric import CocoMetric, Iou
from .precision_recall import Found, found_in_images, report_of

_SHOWN = (0.5, 0.75)


@METRICS.register_module()
class DOTAMetric(CocoMetric):
    """DOTA's AP of turned boxes: ``dota/mAP``, the mean over classes and IoU thresholds, ``dota/AP50``, ``dota/AP75``.

    In the order of their scores over all images, detections of a class are right if the IoU of their polygon with that
    of the true box which they overlap most is above the threshold, and no earlier one has taken that. Those on a
    difficult box (``ignored_instances``, or ``ignore`` in the file) do not count. A class without true boxes does not
    count, and a value without any is -1.

    ``classwise_results`` and ``curve_report`` are those of :class:`CocoMetric`, with ``mAP``, ``AP50`` and ``AP75`` in
    the first one, and at the least of the thresholds in the other.

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
    box_dim = 5

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
        for annotation in self._content["annotations"] if self._content else ():
            self._box_of(annotation)  # A mistake is found now, and not after the first epoch.
        self._shown = {f"AP{100 * iou:.3g}": iou for iou in (_SHOWN if iou_thrs is None else self.iou_thrs)}

    @property
    def metric_names(self) -> list[str]:
        """The names of the metrics without the prefix, where ``*`` is the name of a class."""
        return ["mAP", *self._shown, *(["mAP/*"] if self.classwise else [])]

    def _boxes_of(self, bboxes: torch.Tensor, scale: Sequence[float] = (1.0, 1.0)) -> np.ndarray:
        return (boxes_to_polygons(bboxes.double().cpu()).numpy() / scale).reshape(-1, 8)

    def _true_boxes(self, instances: Any, scale: Sequence[float]) -> np.ndarray:
        if "polygons" in instances:
            return instances["polygons"].cpu().numpy().reshape(-1, 8)
        return super()._true_boxes(instances, scale)

    def _box_of(self, annotation: dict) -> list[float]:
        corners = corners_of(annotation)
        if corners is None:
            raise InvalidInputError(
                f"DOTAMetric: an annotation of {self._ann_file} has no segmentation of four points: {annotation!r:.300}"
            )
        return corners

    def _metrics_of_class(self, row: dict[str, Any]) -> dict[str, float]:
        return {f"mAP/{row['name']}": row["mAP"]}

    def _measured(
        self, truth: list[dict], detections: list[dict], num_images: int, classes: Sequence[str]
    ) -> dict[str, float]:
        least = min(self.iou_thrs)
        images = found_in_images(truth, detections, num_images, len(classes), _iou, least, box_dim=8)
        self.curve_report = report_of(images, classes, f"rotated IoU {least:g}")
        matches = _matches(images)
        precisions = np.array([self._precisions(matches, label) for label in range(len(classes))])
        for row, (name, curve) in zip(precisions, self.curve_report.classes.items(), strict=True):
            self.classwise_results.append(
                {"name": name, "num_boxes": curve["num_truths"], **self._values(row)}
            )
        return self._values(precisions)

    def _values(self, precisions: np.ndarray) -> dict[str, float]:
        """Return the metrics of APs [..., thresholds] by name."""
        values = {"mAP": mean_of_defined(precisions)}
        for name, iou in self._shown.items():
            values[name] = mean_of_defined(precisions[..., np.isclose(self.iou_thrs, iou)])
        return values

    def _precisions(self, matches: "_Matches", label: int) -> list[float]:
        """Return the AP of a class at each threshold, -1 if it has no true boxes."""
        num_truths = np.count_nonzero((matches.labels == label) & ~matches.is_difficult)
        if not num_truths:
            return [-1.0] * len(self.iou_thrs)
        ious, truths = matches.ious[matches.predicted == label], matches.truths[matches.predicted == label]
        found = []
        for iou in self.iou_thrs:
            hits = np.flatnonzero(ious > iou)
            is_right = np.zeros(len(ious), bool)
            is_right[hits[np.unique(truths[hits], return_index=True)[1]]] = True
            counts = np.ones(len(ious), bool)
            counts[hits] = ~matches.is_difficult[truths[hits]]
            right = np.cumsum(is_right[counts])
            precision = right / np.arange(1, len(right) + 1)
            found.append(_average_precision(right / num_truths, precision, self.eval_mode))
        return found


class _Matches(NamedTuple):
    """All detections, the highest score first, and all true boxes.

    Attributes:
        predicted: [m], the class of each detection. ious, truths: [m], its greatest IoU with a true box of its class,
            and the position of that among all true boxes, which has no meaning if the IoU is 0.
        labels, is_difficult: [n], of the true boxes.
    """

    predicted: np.ndarray
    ious: np.ndarray
    truths: np.ndarray
    labels: np.ndarray
    is_difficult: np.ndarray


def _iou(boxes: np.ndarray, true_boxes: np.ndarray, is_crowd: Sequence[bool]) -> np.ndarray:
    """Return the IoU [m, n] of polygons [m, 8] and [n, 8], whether they are difficult or not."""
    return OPS.get("box_iou_quadri")(torch.from_numpy(boxes), torch.from_numpy(true_boxes)).numpy()


def _matches(images: Sequence[Found]) -> _Matches:
    ious, truths = [], []
    num_before = 0
    for image in images:
        overlap = np.where(image.predicted[:, None] == image.labels, image.closeness(), 0.0)
        overlap = np.pad(overlap, ((0, 0), (0, 1)))  # with nothing, so that there is a greatest one
        ious.append(overlap.max(axis=1))
        truths.append(num_before + overlap.argmax(axis=1))
        num_before += len(image.labels)

    def joined(parts: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate(list(parts))

    order = np.argsort(-joined(image.scores for image in images), kind="stable")
    return _Matches(
        joined(image.predicted for image in images)[order],
        joined(ious)[order],
        joined(truths)[order],
        joined(image.labels for image in images),
        joined(image.is_crowd for image in images),
    )


def _average_precision(recall: np.ndarray, precision: np.ndarray, mode: str) -> float:
    """Return the AP of the recalls and precisions [m] of all detections, the highest score first."""
    greatest = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    if mode == "area":
        return float(np.diff(recall, prepend=0) @ greatest[:-1])
    return float(greatest[np.searchsorted(recall, np.arange(0.0, 1.1, 0.1))].mean())
