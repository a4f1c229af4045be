"""Average precision of turned boxes, as DOTA defines it."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from visdet.checks.arguments import also_takes
from visdet.registry import METRICS, OPS
from visdet.structures.coco_json import needed_corners
from visdet.structures.rotated_boxes import boxes_to_polygons

from .box_evaluation import MAX_DETS_OF_AP, BoxEvaluation
from .coco_metric import CocoMetric, Iou
from .nearest_matches import Nearest
from .precision_recall import CurveReport, found_in_images, report_of

_SHOWN = (0.5, 0.75)
_RECALLS = np.arange(0.0, 1.1, 0.1)


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
    item_prefix = ""
    class_metrics = ("mAP/*",)

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
        content = self._content
        for annotation in content["annotations"] if content else ():
            self._box_of(annotation)  # A mistake is found now, and not after the first epoch.
        shown = _SHOWN if iou_thrs is None else self.iou_thrs
        self.precisions = {"mAP": {}, **{f"AP{100 * iou:.3g}": {"iou": iou} for iou in shown}}
        self.metric_items = list(self.precisions)

    def _boxes_of(self, instances: Any, scale: Sequence[float] = (1.0, 1.0)) -> np.ndarray:
        if "polygons" in instances:  # the corners in the file, of true boxes alone
            return instances["polygons"].cpu().numpy().reshape(-1, 8)
        return (boxes_to_polygons(instances["bboxes"].double().cpu()).numpy() / scale).reshape(-1, 8)

    def _box_of(self, annotation: dict) -> list[float]:
        return needed_corners(annotation, f"DOTAMetric: an annotation of {self.ann_file}")

    def _evaluated(
        self, truth: list[list[dict]], results: list[dict], classes: Sequence[str]
    ) -> tuple[BoxEvaluation, CurveReport]:
        thresholds = self.iou_thrs
        least = min(thresholds)
        images = found_in_images(truth, results, len(classes), _iou, least)
        report = report_of(images, classes, f"rotated IoU {least:g}")
        nearest = Nearest.of(images)
        num_truths = [curve["num_truths"] for curve in report.classes.values()]
        recalls = _RECALLS if self.eval_mode == "11points" else None
        rows = [nearest.precisions(nearest.closeness > iou, num_truths, recalls) for iou in thresholds]
        precisions = np.where(num_truths, rows, -1.0)
        return BoxEvaluation(
            precisions[:, None, :, None, None], np.empty(0), thresholds, [MAX_DETS_OF_AP]
        ), report


def _iou(boxes: np.ndarray, true_boxes: np.ndarray, is_crowd: Sequence[bool]) -> np.ndarray:
    """Return the IoU [m, n] of polygons [m, 8] and [n, 8], whether they are difficult or not."""
    return OPS.get("box_iou_quadri")(torch.from_numpy(boxes), torch.from_numpy(true_boxes)).numpy()
