"""The detections in one image, as a detector returns them."""

import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from mmengine.structures import InstanceData
from PIL import Image
from torch import Tensor

from visdet.checks.arguments import Share, checked
from visdet.checks.finite import DIVERGED, check_finite
from visdet.errors import InvalidInputError, MissingPackageError, UserError
from visdet.files.writing import write_atomically, written_whole
from visdet.registry import OPS
from visdet.structures import DetDataSample
from visdet.structures.class_names import checked_names
from visdet.structures.coco_json import enclosing_bbox
from visdet.structures.rotated_boxes import boxes_to_polygons

from .sample_images import image_file_of

__all__ = ["Detection", "Detections", "detections_of"]

_CORNERS = [0, 1, 2, 1, 2, 3, 0, 3]  # of a box (x1, y1, x2, y2), clockwise from the top left one


class Detection(NamedTuple):
    """One detection: its class, the position of that in the list of all, its score, and its row of the boxes."""

    class_name: str
    label: int
    score: float
    box: tuple[float, ...]


class Detections:
    """The detections in one image, the highest score first.

    ``len``, a loop and ``found[0]`` give a :class:`Detection` each. A slice, a mask or positions give the
    ``Detections`` that they choose: ``found[found.scores > 0.8]``. A notebook shows the picture.

    Args:
        sample: the predictions of the model for the image, on the CPU.
        classes: the names of the labels.
        thresholds: the lowest score of the detections that are kept, one number or one for each class.
        image: the pixels, RGB uint8 [H, W, 3]. The default is to read the file of the sample when they are needed.
        draw: a function of the pixels and a sample that returns the picture.
        frame: the number of the frame, if the image is one of a video.
        time: when the frame is shown, in seconds.
        category_ids: the number of each class in the annotation file that the model was trained with, if all are known.

    Attributes:
        boxes: float32 [N, 4] (x1, y1, x2, y2) in pixels of the image, or turned boxes [N, 5] (cx, cy, w, h, angle in
            radians, clockwise).
        scores: float32 [N] in 0..1.
        labels: int64 [N], positions in ``classes``.
        classes: the names of all labels.
        path: the file of the image or the video, or None.
        frame: the number of the frame in the video from 0 on, or None.
        time: when the frame is shown, in seconds since the start of the video, or None.
        shape: the (height, width) of the image.
        sample: the sample with the detections that are kept.

    Raises:
        InvalidInputError: a score or a box is NaN or infinite.
    """

    def __init__(
        self,
        sample: DetDataSample,
        classes: Sequence[str],
        thresholds: float | Sequence[float] = 0.0,
        image: np.ndarray | None = None,
        draw: Callable[[np.ndarray, DetDataSample], np.ndarray] | None = None,
        frame: int | None = None,
        time: float | None = None,
        category_ids: Sequence[int] | None = None,
    ) -> None:
        self.classes = checked_names("Detections: classes", classes)
        is_known = category_ids and len(category_ids) == len(self.classes) and None not in category_ids
        self.category_ids = category_ids if is_known else None
        found = sample.pred_instances
        boxes = found.bboxes
        scores = found.scores.float()
        labels = found.labels
        self.path: str | None = sample.get("img_path")
        self.frame = frame
        self.time = time
        if "ori_shape" not in sample:
            raise InvalidInputError(
                "a sample has no ori_shape: it must be among the meta_keys of PackDetInputs in the pipeline"
            )
        check_finite(f"image {self.path or 'in memory'}", DIVERGED, scores=scores, bboxes=boxes)
        order = torch.argsort(scores, descending=True, stable=True)
        least = torch.as_tensor(thresholds, dtype=torch.float32, device=scores.device)
        kept = order[(scores >= (least[labels] if least.dim() else least))[order]]
        kept_boxes = boxes[kept].float()
        kept_scores = scores[kept]
        kept_labels = labels[kept]
        self.boxes: Tensor = kept_boxes
        self.scores: Tensor = kept_scores
        self.labels: Tensor = kept_labels
        self.shape = tuple(map(int, sample.ori_shape[:2]))
        own = sample.new()
        own.pred_instances = InstanceData(bboxes=kept_boxes, scores=kept_scores, labels=kept_labels)
        self.sample = own
        self._image = image
        self.drawing = draw

    def __len__(self) -> int:
        return len(self.scores)

    def __repr__(self) -> str:
        height, width = self.shape
        found = Counter(self.class_names).items()
        counts = ", ".join(f"{count} {name}" for name, count in found) or "nothing"
        where = self.path or "an image"
        where += "" if self.frame is None else f", frame {self.frame},"
        return f"Detections({counts} in {where} of {width}x{height} pixels)"

    def __iter__(self) -> Iterator[Detection]:
        columns = (self.labels.tolist(), self.scores.tolist(), self.boxes.tolist())
        for label, score, box in zip(*columns, strict=True):
            yield Detection(self.classes[label], label, score, tuple(box))

    @overload
    def __getitem__(self, index: int) -> Detection: ...

    @overload
    def __getitem__(self, index: slice | list | np.ndarray | Tensor) -> "Detections": ...

    def __getitem__(self, index: Any) -> "Detection | Detections":
        if isinstance(index, int | np.integer):
            return list(self)[index]
        whole = self.sample
        sample = whole.new()
        sample.pred_instances = whole.pred_instances[index]
        options = (self._image, self.drawing, self.frame, self.time, self.category_ids)
        return Detections(sample, self.classes, 0.0, *options)

    @checked
    def filter(
        self, classes: str | Sequence[str] | None = None, score_threshold: Share = 0.0
    ) -> "Detections":
        """Return the detections of some classes, which are named, and of some score."""
        known = self.classes
        names = [classes] if isinstance(classes, str) else known if classes is None else classes
        for name in names:
            if name not in known:
                raise InvalidInputError(f"classes must be among {', '.join(known)}, got {name!r}")
        is_kept = [one.class_name in names and one.score >= score_threshold for one in self]
        return self[torch.tensor(is_kept, dtype=torch.bool)]

    @checked
    def nms(self, iou_threshold: Share) -> "Detections":
        """Return the detections without those that a better one of their class overlaps by more than a threshold."""
        suppress = OPS.get("batched_nms")
        settings = {"type": "nms_rotated" if self.are_turned else "nms", "iou_threshold": iou_threshold}
        return self[suppress(self.boxes, self.scores, self.labels, settings)[1]]

    @property
    def are_turned(self) -> bool:
        """Whether the boxes are turned."""
        return self.boxes.shape[1] == 5

    @property
    def polygons(self) -> Tensor:
        """The corners (x, y) of the boxes, float32 [N, 4, 2], from the top left one clockwise as the box is turned."""
        boxes = self.boxes
        return boxes_to_polygons(boxes) if self.are_turned else boxes[:, _CORNERS].reshape(-1, 4, 2)

    @property
    def enclosing_boxes(self) -> Tensor:
        """The upright boxes around the boxes, float32 [N, 4] (x1, y1, x2, y2)."""
        return torch.cat(self.polygons.aminmax(dim=1), 1)

    @property
    def class_names(self) -> list[str]:
        """The name of the class of each detection."""
        return [self.classes[label] for label in self.labels.tolist()]

    @property
    def image(self) -> np.ndarray:
        """The pixels of the image, RGB uint8 [H, W, 3]."""
        return image_file_of(self.sample) if self._image is None else self._image

    @checked
    def draw(self, out_file: str | os.PathLike | None = None) -> Image.Image:
        """Return a picture of the image with its detections, and write it to ``out_file`` if that is given.

        Raises:
            UserError: the file cannot be written.
        """
        if self.drawing is None:
            raise UserError("these detections come from no detector, which would draw them")
        picture = Image.fromarray(self.drawing(self.image, self.sample))
        if out_file is not None:
            try:
                with written_whole(Path(out_file).expanduser(), reaches_disk=False) as partial:
                    picture.save(partial)
            except (ValueError, TypeError) as error:
                raise UserError(f"cannot write {out_file}: {error}") from error
        return picture

    def to_dict(self) -> dict[str, Any]:
        """Return the record of the image in ``predictions.json`` of ``visdet infer``, in types of JSON.

        Its keys are ``file``, ``frame`` and ``time`` (of videos only; seconds, 3 decimals), ``height``, ``width`` and
        ``detections``. That is a list of dicts with ``class``, ``label``, ``category_id`` (if it is known), ``score``
        (5 decimals) and ``bbox_xyxy`` (2 decimals). A turned box has ``bbox_cxcywha`` (5 decimals; the angle is in
        radians and turns clockwise) and ``polygon``, its four corners [x, y], instead of ``bbox_xyxy``.
        """
        frame = self.frame
        time = self.time
        numbers = self.category_ids
        record: dict[str, Any] = {"file": self.path}
        if frame is not None:
            record["frame"] = frame
        if time is not None:
            record["time"] = round(time, 3)
        height, width = self.shape
        found = []
        for (name, label, score, box), polygon in zip(self, self.polygons.tolist(), strict=True):
            place: dict[str, Any] = {"bbox_xyxy": _rounded(box, 2)}
            if self.are_turned:
                corners = [_rounded(corner, 2) for corner in polygon]
                place = {"bbox_cxcywha": _rounded(box, 5), "polygon": corners}
            number = {"category_id": int(numbers[label])} if numbers else {}
            found.append({"class": name, "label": label, **number, "score": round(score, 5), **place})
        return record | {"height": height, "width": width, "detections": found}

    @checked
    def save(self, out_file: str | os.PathLike) -> None:
        """Write a file: a .json file holds :meth:`to_dict`, and any other one the picture of :meth:`draw`."""
        if Path(out_file).suffix.lower() != ".json":
            self.draw(out_file)
            return
        write_atomically(Path(out_file).expanduser(), self.to_json() + "\n")

    def _repr_png_(self) -> bytes | None:
        if self.drawing is None:
            return None
        self.draw().save(content := io.BytesIO(), "PNG")
        return content.getvalue()

    @checked
    def to_coco(
        self, image_id: int | str = 0, category_ids: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """Return the detections as COCO's result format has them, with ``bbox`` (x, y, width, height).

        Turned boxes also have a ``segmentation`` of their four corners.

        Args:
            image_id: the number of the image in the annotation file.
            category_ids: the number of each class in the annotation file. The default is those that the model was
                trained with, or 1, 2, 3 …
        """
        count = len(self.classes)
        numbers = category_ids or self.category_ids or range(1, count + 1)
        if len(numbers) != count:
            raise InvalidInputError(f"category_ids must have {count} numbers, got {len(numbers)}")
        records = []
        for (_, label, score, _), corners in zip(self, self.polygons.flatten(1).tolist(), strict=True):
            record: dict[str, Any] = {"image_id": image_id, "category_id": int(numbers[label])}
            record |= {"bbox": enclosing_bbox(corners), "score": score}
            records.append(record | ({"segmentation": [corners]} if self.are_turned else {}))
        return records

    def to_json(self) -> str:
        """Return :meth:`to_dict` as a text in JSON."""
        return json.dumps(self.to_dict())

    def to_supervision(self) -> Any:
        """Return the detections as ``supervision.Detections``, with ``data['class_name']``.

        Turned boxes are in ``data['xyxyxyxy']``, where supervision's ``OrientedBoxAnnotator`` finds them.

        Raises:
            MissingPackageError: the package supervision is not installed.
        """
        try:
            import supervision
        except ImportError as error:
            raise MissingPackageError("to_supervision needs supervision: pip install supervision") from error
        corners = {"xyxyxyxy": self.polygons.numpy()} if self.are_turned else {}
        return supervision.Detections(
            xyxy=self.enclosing_boxes.numpy(),
            confidence=self.scores.numpy(),
            class_id=self.labels.numpy().astype(int),
            data={"class_name": np.array(self.class_names, dtype=str), **corners},
        )


def _rounded(numbers: Iterable[float], decimals: int) -> list[float]:
    return [round(number, decimals) for number in numbers]


def detections_of(
    sample: DetDataSample | dict[str, Any],
    classes: Sequence[str],
    score_thr: float = 0.0,
    category_ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the record of a sample, or of its dict, in ``predictions.json``; see :meth:`Detections.to_dict`."""
    if isinstance(sample, dict):
        found = sample["pred_instances"]
        instances = InstanceData(**{key: found[key] for key in ("bboxes", "scores", "labels")})
        metainfo = {key: sample[key] for key in ("img_path", "ori_shape") if key in sample}
        sample = DetDataSample(metainfo=metainfo, pred_instances=instances)
    return Detections(sample, classes, score_thr, category_ids=category_ids).to_dict()
