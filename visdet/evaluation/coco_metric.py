"""Average precision and recall of boxes, as COCO defines them."""

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from mmengine.dist import is_main_process
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log

from visdet.checks.arguments import Names, Positive, Range, also_takes
from visdet.checks.finite import DIVERGED, check_finite
from visdet.errors import InvalidInputError, listed
from visdet.files.writing import write_atomically
from visdet.registry import METRICS
from visdet.structures.coco_json import (
    box_area,
    id_order,
    is_ignored,
    load_coco_json,
    match_categories,
    written_otherwise,
)
from visdet.structures.tables import table_text

from .box_evaluation import AREAS, BoxEvaluation, detected, evaluate_boxes, import_backend
from .precision_recall import CurveReport, box_report

Iou = Annotated[float, Range(0, 1, is_open=True)]


@METRICS.register_module()
class CocoMetric(BaseMetric):
    """COCO's box AP: ``coco/bbox_mAP``, ``coco/bbox_mAP_50``, ``_75``, ``_s``, ``_m``, ``_l``.

    AP counts at most 100 detections per image. Small, medium and large are areas under 32², under 96² and from 96²
    pixels. A value without ground truth is -1, as in COCO's own code. Values are not rounded. Only images that were
    evaluated count, and a warning is logged if the file has more. Boxes count as the file gives them, as in COCO's own
    code, also beyond the image. Those with ``ignore`` count as crowds, whereas COCO's own code looks for them.

    After an evaluation, ``classwise_results`` holds one dict per class on the main process, with ``name``,
    ``num_boxes`` (without crowds), ``mAP``, ``mAP_50``, ``mAP_75``, ``mAP_s``, ``mAP_m`` and ``mAP_l``.
    ``curve_report`` is a :class:`CurveReport` with the precision over the recall and the confusion matrix at IoU 0.5.

    Args:
        ann_file: the COCO JSON file with the ground truth. ``None`` takes the ground truth from the data
            samples. That of a CocoDataset in ``test_mode`` gives the same values.
        metric: must be ``'bbox'``.
        classwise: log a table of the AP of each class, and also return it as ``coco/bbox_mAP/<class>`` and, as
            mmdet does, ``coco/<class>_precision``.
        format_only: write the detections without evaluating them.
        outfile_prefix: write the detections to ``<outfile_prefix>.bbox.json``, in COCO's result format.
        iou_thrs: IoU thresholds to average over. The default is 0.50, 0.55, .. 0.95.
        proposal_nums: the numbers n of detections per image for ``AR@n``.
        metric_items: the values to return. They are ``mAP``, ``mAP_50``, ``mAP_75``, ``mAP_s``, ``mAP_m``, ``mAP_l``,
            ``AR@n`` for each n of ``proposal_nums``, and ``AR_s@n``, ``AR_m@n`` and ``AR_l@n`` for the largest n. The
            default is all APs.
        backend: ``'faster_coco_eval'`` or ``'pycocotools'``, which give the same values. The default is the first one
            that is installed.
        backend_args: mmengine's file backend for ``ann_file``.
        collect_device: the device on which the results of all processes are gathered, ``'cpu'`` or ``'gpu'``.
        prefix: the prefix of the names instead of ``coco``.

    Raises:
        FileNotFoundError: ``ann_file`` does not exist.
        ValueError: ``ann_file`` lacks keys, or does not fit the classes or the images of the data set. Images are
            checked only when the evaluation runs, everything else before training.

    Source: names and keywords are those of mmdet's CocoMetric. Differences: labels are matched to categories by name,
    and every AP is at 100 detections, whereas mmdet uses the largest of ``proposal_nums`` for all but ``mAP``.
    """

    default_prefix = "coco"
    undefined: ClassVar[float] = -1.0  # COCO's value without ground truth
    box_dim: ClassVar[int] = 4
    item_prefix: ClassVar[str] = "bbox_"
    class_metrics: ClassVar[Sequence[str]] = ("bbox_mAP/*", "*_precision")
    # The arguments of BoxEvaluation.average_precision for each name.
    precisions: Mapping[str, dict[str, Any]] = {
        "mAP": {},
        "mAP_50": {"iou": 0.5},
        "mAP_75": {"iou": 0.75},
        "mAP_s": {"area": "s"},
        "mAP_m": {"area": "m"},
        "mAP_l": {"area": "l"},
    }

    @also_takes(sort_categories=False, file_client_args=None, use_mp_eval=...)
    def __init__(
        self,
        ann_file: str | None = None,
        metric: Literal["bbox"] | Sequence[Literal["bbox"]] = "bbox",
        classwise: bool = False,
        format_only: bool = False,
        outfile_prefix: str | None = None,
        iou_thrs: Iou | Sequence[Iou] | None = None,
        proposal_nums: Sequence[Positive] = (100, 300, 1000),
        metric_items: Names | None = None,
        backend: Literal["faster_coco_eval", "pycocotools"] | None = None,
        backend_args: dict | None = None,
        collect_device: str = "cpu",
        prefix: str | None = None,
    ) -> None:
        super().__init__(collect_device=collect_device, prefix=prefix)
        if format_only and outfile_prefix is None:
            raise InvalidInputError(
                "CocoMetric: format_only=True needs an outfile_prefix to write to, got None"
            )
        self.classwise = classwise
        self.format_only = format_only
        self.outfile_prefix = outfile_prefix
        self.iou_thrs = np.linspace(0.5, 0.95, 10) if iou_thrs is None else np.atleast_1d(iou_thrs)
        numbers = sorted(proposal_nums)
        self.proposal_nums = numbers
        recalls = [f"AR@{n}" for n in numbers]
        recalls += [f"AR_{area}@{numbers[-1]}" for area in AREAS[1:]]
        known = [*self.precisions, *recalls]
        items = list(metric_items or self.precisions)
        self.metric_items = items
        unknown = [item for item in items if item not in known]
        if unknown:
            raise InvalidInputError(f"CocoMetric: metric_items must be of {known}, got {unknown}")
        self.classwise_results: list[dict] = []
        self.curve_report: CurveReport | None = None
        self._backend = import_backend(backend)
        self.ann_file: Any = ann_file
        # Only the main process evaluates. It reads the file now, so that mistakes are found before training.
        self._content: Any = None
        if ann_file is not None and is_main_process():
            self._content = load_coco_json(ann_file, backend_args, not format_only)
        self._label_of_category: dict[int | str, int] = {}

    @property
    def metric_names(self) -> list[str]:
        """The names of the metrics without the prefix, where ``*`` is the name of a class."""
        names = [f"{self.item_prefix}{item}" for item in self.metric_items]
        of_classes = self.class_metrics if self.classwise else ()
        return [] if self.format_only else [*names, *of_classes]

    @property
    def dataset_meta(self) -> dict | None:
        """The meta information of the data set, in which ``classes`` names the labels."""
        return self._dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, dataset_meta: dict) -> None:
        self._dataset_meta = dataset_meta
        if self._content is not None:
            categories = self._content["categories"]
            self._label_of_category = match_categories(categories, dataset_meta["classes"], self.ann_file)

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Keep the detections of a batch.

        Args:
            data_batch: not used.
            data_samples: dicts with ``img_id`` and ``pred_instances``, which are ``bboxes`` [N, 4] (x1, y1, x2, y2) in
                pixels of the original image, ``scores`` [N] and ``labels`` [N]. Without an ``ann_file`` they must also
                have ``gt_instances`` (``bboxes``, ``labels`` and, in pixels of the original image, ``areas``, which
                are those of the boxes by default) and, if the images were resized, ``scale_factor``.
        """
        for sample in data_samples:
            predicted = sample["pred_instances"]
            owner = type(self).__name__
            path = sample.get("img_path")
            if "img_id" not in sample:
                raise InvalidInputError(
                    f"{owner}: a sample has no img_id, which must be among the meta_keys of PackDetInputs"
                )
            name = f"{owner}: image {path or sample['img_id']!r}"
            given = {key: predicted[key] for key in ("bboxes", "scores", "labels")}
            shape = tuple(given["bboxes"].shape)
            if len(shape) > 1 and shape[1] != self.box_dim:
                raise InvalidInputError(
                    f"{name}: predicted bboxes must be [N, {self.box_dim}], got {list(shape)}"
                )
            check_finite(name, DIVERGED, **{f"predicted {key}": value for key, value in given.items()})
            result = {
                "img_id": sample["img_id"],
                "img_path": path,
                "bboxes": self._boxes_of(given),
                "scores": _numpy(given["scores"]),
                "labels": _numpy(given["labels"]).astype(int),
            }
            if self.ann_file is None:
                truth = self._truth_of_sample(sample)
                result["truth"] = truth
                check_finite(name, **{"true bboxes": np.array([row["bbox"] for row in truth])})
            self.results.append(result)

    def _boxes_of(self, instances: Any, scale: Sequence[float] = (1.0, 1.0)) -> np.ndarray:
        """Return boxes in an image, which is ``scale`` (width, height) times that of the file, as the file has them."""
        boxes = _numpy(instances["bboxes"]).reshape(-1, 4) / np.tile(scale, 2)
        boxes[:, 2:] -= boxes[:, :2]
        return boxes

    def _box_of(self, annotation: dict) -> list[float]:
        return annotation["bbox"]

    def _truth_of_sample(self, sample: dict) -> list[dict]:
        """Return the ground truth of a data sample, in pixels of the original image."""
        annotations = []
        for iscrowd, field in enumerate(("gt_instances", "ignored_instances")):
            instances = sample.get(field)
            if not instances:
                if iscrowd:
                    continue
                raise InvalidInputError(
                    f"{type(self).__name__}: without an ann_file the data samples must hold gt_instances"
                )
            boxes = self._boxes_of(instances, sample.get("scale_factor", (1.0, 1.0)))
            areas = instances.get(
                "areas", boxes[:, 2] * boxes[:, 3]
            )  # of COCO's boxes, the only ones that have some
            for box, area, label in zip(boxes.tolist(), areas, instances["labels"], strict=True):
                annotations.append(_annotation(int(label), box, float(area), iscrowd))
        return annotations

    def evaluate(self, size: int) -> dict[str, float]:
        """Return the metrics over the images of all processes by name. ``size`` is not used.

        mmengine would keep the first ``size`` results, but images that a sampler repeats may be anywhere.
        """
        return super().evaluate(sys.maxsize)

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        """Return the values of ``metric_items`` by name, without the prefix."""
        meta = self._dataset_meta
        if meta is None:
            raise InvalidInputError(
                f"{type(self).__name__}: set dataset_meta, which names the classes, before evaluating"
            )
        classes = meta["classes"]
        rows: list[dict] = []
        self.classwise_results = rows
        self.curve_report = None
        results = self._different_images(results)
        if self.outfile_prefix is not None:
            self._write(chain.from_iterable(map(detected, results)))
        if self.format_only:
            return {}
        results = sorted(results, key=_id_order)
        evaluation, report = self._evaluated(self._truth_of(results), results, classes)
        self.curve_report = report
        metrics = {
            f"{self.item_prefix}{item}": self._value_of(evaluation, item) for item in self.metric_items
        }
        for label, (name, curve) in enumerate(report.classes.items()):
            row = {"name": name, "num_boxes": curve["num_truths"]}
            for item, choice in self.precisions.items():
                row[item] = evaluation.average_precision(label=label, **choice)
            rows.append(row)
        if self.classwise:
            columns = ("class", "boxes", *self.precisions)
            print_log("\n" + table_text(columns, (tuple(row.values()) for row in rows)), logger="current")
            for row in rows:
                for metric in self.class_metrics:
                    metrics[metric.replace("*", row["name"])] = row["mAP"]
        return metrics

    def _evaluated(
        self, truth: list[list[dict]], results: list[dict], classes: Sequence[str]
    ) -> tuple[BoxEvaluation, CurveReport]:
        """Return the APs and the curves of the classes.

        Args:
            truth, results, classes: see :func:`box_report`.
        """
        evaluation = evaluate_boxes(
            truth, results, len(classes), self.iou_thrs, self.proposal_nums, self._backend
        )
        return evaluation, box_report(truth, results, classes, self._backend.iou)

    def _value_of(self, evaluation: BoxEvaluation, item: str) -> float:
        precisions = self.precisions
        if item in precisions:
            return evaluation.average_precision(**precisions[item])
        name, _, max_dets = item.partition("@")
        return evaluation.average_recall(int(max_dets), name.removeprefix("AR_") if "_" in name else "all")

    def _different_images(self, results: list[dict]) -> list[dict]:
        """Return the result of each image once, since samplers repeat images to fill batches.

        Raises:
            InvalidInputError: several images have the same id, and their paths need not or do not tell them apart.
        """
        needs_ids = self.ann_file is not None or self.outfile_prefix is not None
        found: dict[Any, dict] = {}
        for result in results:
            number = result["img_id"]
            path = result["img_path"]
            key = number if needs_ids else (number, path)
            other = found.get(key, result)
            if any(other.get(part) != result.get(part) for part in ("img_path", "truth")):
                raise InvalidInputError(
                    f"{type(self).__name__}: the images {other['img_path']} and {path} have the same id "
                    f"{number!r} and differ in their paths or true boxes. Give every image an id of its own. Images of "
                    "several data sets may share ids if neither ann_file nor outfile_prefix is set"
                )
            found[key] = result
        return list(found.values())

    def _truth_of(self, results: list[dict]) -> list[list[dict]]:
        """Return the true boxes of each image, from the samples or from ``ann_file``."""
        if self.ann_file is None:
            return [result["truth"] for result in results]
        truth: list[list[dict]] = [[] for _ in results]
        number_of = {result["img_id"]: number for number, result in enumerate(results)}
        content = self._content
        name_of = {image["id"]: image.get("file_name") for image in content["images"]}
        self._check_images(set(number_of), set(name_of))
        for number, result in zip(number_of, results, strict=True):
            path, name = result["img_path"], name_of[number]
            if path and name and PurePath(path).stem != PurePath(name).stem:
                self._warn(
                    f"image {number!r} of {self.ann_file} is {name}, but that of the data set {path}. "
                    "Evaluator and data set must name the same file, or the values mean nothing"
                )
                break
        for row in content["annotations"]:
            label = self._label_of_category.get(row["category_id"])
            image = number_of.get(row["image_id"])
            if label is not None and image is not None:
                truth[image].append(_annotation(label, self._box_of(row), box_area(row), is_ignored(row)))
        return truth

    def _check_images(self, evaluated: set, in_file: set) -> None:
        owner = type(self).__name__
        path = self.ann_file
        unknown = sorted(evaluated - in_file, key=id_order)
        if unknown:
            hint = written_otherwise(unknown[0], in_file)
            raise InvalidInputError(
                f"{owner}: ann_file {path} does not have {len(unknown)} of the "
                f"{len(evaluated)} evaluated images: ids {listed(map(repr, unknown), 5)}. Evaluator and data set must "
                f"name the same file" + (f"; an image is {hint}" if hint else "")
            )
        if evaluated != in_file:
            self._warn(
                f"{len(in_file - evaluated)} of the {len(in_file)} images of {path} were not evaluated and do not count"
            )

    def _warn(self, message: str) -> None:
        print_log(f"{type(self).__name__}: {message}", logger="current", level=logging.WARNING)

    def _write(self, detections: Iterable[dict]) -> None:
        """Write the detections of classes that ``ann_file``, or else the data set, has, with their category ids."""
        meta: Any = self._dataset_meta
        number_of = dict(enumerate(meta.get("category_ids") or range(1, len(meta["classes"]) + 1)))
        if self.ann_file is not None:
            number_of = {label: number for number, label in self._label_of_category.items()}
        rows = []
        for row in detections:
            number = number_of.get(row["category_id"])
            if number is not None:
                rows.append({**row, "category_id": number})
        path = f"{self.outfile_prefix}.bbox.json"
        write_atomically(path, json.dumps(rows))
        print_log(f"wrote {len(rows)} detections to {path}", logger="current")


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def _annotation(label: int, bbox: list[float], area: float, iscrowd: int) -> dict:
    return {
        "category_id": label,
        "bbox": bbox,
        "area": area,
        "iscrowd": int(iscrowd),
    }


def _id_order(result: dict) -> tuple[bool, int | str]:
    return id_order(result["img_id"])
