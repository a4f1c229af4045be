"""Detection data sets in COCO format, which consist of a JSON file and a folder of images."""

import functools
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from mmengine import fileio
from mmengine.dataset import BaseDataset
from mmengine.fileio import get_file_backend
from mmengine.logging import print_log

from visdet.checks.arguments import also_takes, checked
from visdet.checks.similar_names import look_alike
from visdet.errors import InvalidInputError, MissingFileError, listed, where_to_get
from visdet.files.images import open_image, sizes_of
from visdet.registry import DATASETS
from visdet.structures.class_names import checked_classes
from visdet.structures.coco_json import (
    box_area,
    class_of_id,
    enclosing_bbox,
    is_ignored,
    lacks_size,
    load_coco_json,
    match_categories,
    needed_corners,
)

from .transforms.base import composed

# The 80 categories of COCO 2017, in the order of its JSON files.
_COCO_NAMES = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop
sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack,
umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball
glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana,
apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed,
dining table, toilet, tv, laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink,
refrigerator, book, clock, vase, scissors, teddy bear, hair drier, toothbrush
"""
COCO_CLASSES = tuple(" ".join(_COCO_NAMES.split()).split(", "))

_WHERE_DATA_ARE_NAMED = "data_root, ann_file and data_prefix of the config say where the data set is"
_WHERE_COCO_IS = (
    "for COCO 2017, get train2017.zip, val2017.zip and annotations_trainval2017.zip from cocodataset.org, unpacked "
    f"in {{}}; for other data, {_WHERE_DATA_ARE_NAMED}"
)

# A box that extends beyond the image by less than this is not a mistake of the file. COCO's own boxes do, by rounding.
_OVERHANG_PX = 1.0
_MIN_SIDE_PX = 1.0


@DATASETS.register_module()
class CocoDataset(BaseDataset):
    """A detection data set that consists of a COCO JSON file and a folder of images.

    An item is the output of the pipeline for a record ``dict(img_path, img_id, height, width, instances, sample_idx)``.
    An instance is ``dict(bbox=[x1, y1, x2, y2] in pixels of the image, bbox_label, ignore_flag)``, where
    ``ignore_flag`` is 1 for crowd regions. Labels are positions in ``metainfo['classes']``, which are matched by name.

    When the file is loaded, before any training, its keys, its categories and every box are checked, and all image
    files must exist. Those whose records have neither a width nor a height are opened for them. Boxes are clipped to
    the image. Boxes with ``ignore``, outside the image, or less than one pixel wide or high, are dropped. One warning
    reports their numbers. In ``test_mode`` all boxes stay as the file gives them, because that is how COCO counts them.
    Those with ``ignore`` have the ``ignore_flag``, and an instance has its ``area``, too.

    With ``box_type='rbox'``, boxes are turned. The ``bbox`` of an instance then has the four corners (x1, y1, ..., x4,
    y4) of the ``segmentation`` of its annotation, in order even if its sides cross, and a record has the
    ``angle_version``. Turned boxes are not clipped, but dropped if the upright box around them would be.
    :func:`load_coco_json` says how a ``bbox`` of five numbers is read.

    Args:
        ann_file: the JSON file, relative to ``data_root``.
        data_root: folder that ``ann_file`` and ``data_prefix`` are relative to.
        data_prefix: ``dict(img=folder of the images)``.
        metainfo: ``dict(classes=(...), palette=[(r, g, b), ...])``. By default, the classes are the 80 of COCO, and a
            file with other categories is refused. If classes are given, boxes of other categories are left out. If
            there is no palette, colours are generated.
        filter_cfg: ``dict(filter_empty_gt=bool, min_size=int)``, which leaves out images that have no box except
            crowds, and images whose shorter side is under ``min_size`` pixels. It is ignored in ``test_mode``.
        pipeline: transforms, as configs or callables.
        test_mode: keep every image, and never replace one whose pipeline returns ``None``.
        indices: the number of images to use from the beginning, or a list of positions.
        serialize_data: keep the records as one byte buffer that worker processes share.
        lazy_init: load the file at the first use instead of now.
        max_refetch: the number of other images to try if the pipeline returns ``None`` in training.
        backend_args: mmengine's file backend, for a JSON file that is not on a local disk.
        allow_no_boxes: train even if no image has a box.
        allow_absent_classes: accept ``metainfo['classes']`` that have no category in the file.
        return_classes: must be False, because no model of visdet reads the class names as text.
        box_type: ``'hbox'`` for upright boxes, ``'rbox'`` for turned ones.
        angle_version: the range of the angles of turned boxes, ``'le90'``, ``'oc'`` or ``'le135'``; see
            :func:`visdet.structures.rotated_boxes.regularized`.

    Raises:
        FileNotFoundError: the JSON file or images are missing.
        ValueError: a key is missing, categories do not fit the classes, a class has no category, no image or box is
            left to train on, or an annotation has no four corners although ``box_type`` is ``'rbox'``.

    Source: names and filtering rules are those of mmdet's CocoDataset. Differences: labels follow the order of
    ``classes`` and not of the file, boxes are clipped, and mistakes are reported.
    """

    METAINFO = {"classes": COCO_CLASSES}

    _fully_initialized: bool  # an attribute of mmengine's BaseDataset

    @also_takes(seg_map_suffix=..., proposal_file=None, caption_prompt=None, file_client_args=None)
    def __init__(
        self,
        ann_file: str = "",
        data_root: str = "",
        data_prefix: dict[str, str] | None = None,
        metainfo: dict | None = None,
        filter_cfg: dict | None = None,
        pipeline: Sequence[dict | Callable] = (),
        test_mode: bool = False,
        indices: int | Sequence[int] | None = None,
        serialize_data: bool = True,
        lazy_init: bool = False,
        max_refetch: int = 1000,
        backend_args: dict | None = None,
        return_classes: Literal[False] = False,
        allow_no_boxes: bool = False,
        allow_absent_classes: bool = False,
        box_type: Literal["hbox", "rbox"] = "hbox",
        angle_version: Literal["le90", "oc", "le135"] = "le90",
    ) -> None:
        data_prefix = {"img": ""} if data_prefix is None else data_prefix
        if set(data_prefix) != {"img"}:
            raise InvalidInputError(
                f"{type(self).__name__}: data_prefix must be dict(img='folder of the images'), got {dict(data_prefix)}"
            )
        self._needs_box, self._least_side = checked_filter_cfg(**(filter_cfg or {}))
        self.backend_args = backend_args
        self._allow_no_boxes = allow_no_boxes
        self._allow_absent_classes = allow_absent_classes
        self._classes_are_chosen = "classes" in (metainfo or {})
        self.box_type = box_type
        self.angle_version = angle_version
        super().__init__(
            ann_file=ann_file,
            metainfo=metainfo,
            data_root=data_root,
            data_prefix=data_prefix,
            filter_cfg=filter_cfg,
            indices=indices,
            serialize_data=serialize_data,
            pipeline=composed(pipeline).transforms,  # by visdet's registry, whatever the default scope is
            test_mode=test_mode,
            lazy_init=lazy_init,
            max_refetch=max_refetch,
        )

    @classmethod
    def _load_metainfo(cls, metainfo: dict | None = None) -> dict:
        loaded = super()._load_metainfo(metainfo)
        if metainfo and "classes" in metainfo and "palette" not in metainfo:
            loaded.pop("palette", None)  # The default palette belongs to the default classes.
        return checked_classes(loaded, f"{cls.__name__}: metainfo")

    def full_init(self) -> None:
        """Load and filter the records, select ``indices``, check that the image files exist, and serialize.

        mmengine's does not check what ``filter_data`` of a subclass has left.
        """
        indices = self._indices
        if self._fully_initialized:
            return
        self.data_list = self.load_data_list()
        num_in_file = len(self.data_list)
        self.data_list = self.filter_data()
        if indices is not None:
            self.data_list = self._get_unserialized_subset(indices)
        if not self.data_list:
            raise InvalidInputError(
                f"{type(self).__name__}: no image is left of the {num_in_file} in {self.ann_file} "
                f"(filter_cfg={self.filter_cfg}, indices={indices})"
            )
        self._check_image_files()
        if self.serialize_data:
            self.data_bytes, self.data_address = self._serialize_data()
        self._fully_initialized = True

    def load_data_list(self) -> list[dict]:
        """Return one record per image in the order of the file, after all boxes have been checked."""
        is_coco = self.metainfo["classes"] == COCO_CLASSES
        with where_to_get(_WHERE_COCO_IS.format(self.data_root or ".") if is_coco else _WHERE_DATA_ARE_NAMED):
            content = load_coco_json(self.ann_file, self.backend_args, needs_annotations=not self.test_mode)
        folder = self.data_prefix["img"]
        number = add_sizes(content["images"], folder, self.backend_args)
        if number:
            self._warn(
                f"{number} images have neither width nor height, so that their files were opened for it"
            )
        label_of_category = self._match_categories(content)
        annotations_of_image = defaultdict(list)
        for annotation in content["annotations"]:
            annotations_of_image[annotation["image_id"]].append(annotation)
        tally: Counter[str] = Counter()
        records = []
        # The backend is looked up once, because that takes longer than to join a path.
        join_path = get_file_backend(folder).join_path
        for image in content["images"]:
            annotations = annotations_of_image.pop(image["id"], [])
            record = self._parse_image(image, annotations, label_of_category, tally)
            records.append({"img_path": join_path(folder, image["file_name"]), **record})
        num_orphans = sum(map(len, annotations_of_image.values()))
        tally.update({"boxes": num_orphans, "of an image that is not in the file": num_orphans})
        self._report_boxes(tally)
        self.most_boxes = max((len(record["instances"]) for record in records), default=0)
        if not (self.test_mode or self._allow_no_boxes or any(map(_has_box, records))):
            raise InvalidInputError(
                f"annotation file {self.ann_file}: none of its {len(records)} images has a box of "
                "metainfo['classes'] that is no crowd, so there is nothing to learn from it. To train on it "
                "nevertheless, set allow_no_boxes=True in the data set's config"
            )
        return records

    def _match_categories(self, content: dict) -> dict[int | str, int]:
        """Return {category id: label}, and report classes without a category and categories without a class."""
        classes = self.metainfo["classes"]
        file = self.ann_file
        categories = content["categories"]
        matched = match_categories(categories, classes, file)
        number_of = {label: number for number, label in matched.items()}
        self.category_ids = [number_of.get(label) for label in range(len(classes))]
        num_boxes = Counter(annotation["category_id"] for annotation in content["annotations"])
        names = class_of_id(content)
        left_out = {
            names.get(key, f"id {key}"): count for key, count in num_boxes.items() if key not in matched
        }
        named = tuple(names.values())
        if left_out and not self._classes_are_chosen:
            raise InvalidInputError(
                f"annotation file {file} has categories that are not among the default classes of "
                f"{type(self).__name__}: {listed(left_out)}. Name the classes to train on in the data set's "
                f"config, metainfo=dict(classes={named!r:.500}), and set the model's num_classes"
            )
        absent = [name for label, name in enumerate(classes) if label not in number_of]
        if absent:
            message = f"it has no category for {len(absent)} of the {len(classes)} classes: {listed(absent)}"
            if self._classes_are_chosen and not self._allow_absent_classes:
                raise InvalidInputError(
                    f"annotation file {file}: {message}; its categories: {listed(named)}. "
                    "Correct metainfo['classes'], or set allow_absent_classes=True in the data set's config"
                )
            self._warn(message)
        if left_out:
            alike = [hint for name in left_out if (hint := look_alike(name, classes))]
            self._warn(
                f"{sum(left_out.values())} of its boxes are left out, because their categories are not in "
                f"metainfo['classes']: {listed([f'{name} ({count})' for name, count in left_out.items()])}"
                + (f". Class {listed(alike, 3)}" if alike else "")
            )
        return matched

    def _parse_image(self, image: dict, annotations: list, label_of_category: dict, tally: Counter) -> dict:
        width, height = image["width"], image["height"]
        is_upright = self.box_type == "hbox"
        instances = []
        for annotation in annotations:
            label = label_of_category.get(annotation["category_id"])
            if label is None or (annotation.get("ignore") and not self.test_mode):
                continue
            tally["boxes"] += 1
            corners = None if is_upright else self._corners_of(annotation)
            bbox, problem = clip_box(annotation, width, height)
            if corners is not None:
                bbox, problem = bbox and corners, None if problem == "clipped" else problem
            if problem is not None:
                tally[problem] += 1
            instance = {"bbox": bbox, "bbox_label": label, "ignore_flag": int(is_ignored(annotation))}
            if self.test_mode:
                x, y, w, h = annotation["bbox"]
                instance.update(bbox=corners or [x, y, x + w, y + h], area=box_area(annotation))
            if instance["bbox"] is not None:
                instances.append(instance)
        record = {
            "img_id": image["id"],
            "height": height,
            "width": width,
            "instances": instances,
        }
        return record if is_upright else {**record, "angle_version": self.angle_version}

    def _corners_of(self, annotation: dict) -> list[float]:
        """Return the corners of a turned box, and give its annotation the upright box around them."""
        corners = needed_corners(annotation, f"with box_type='rbox', an annotation of {self.ann_file}")
        annotation["bbox"] = enclosing_bbox(corners)
        return corners

    def _report_boxes(self, tally: Counter) -> None:
        total = tally.pop("boxes", 0)
        clipped = tally.pop("clipped", 0)
        dropped = +tally  # without what does not occur
        num_dropped = dropped.total()
        if not num_dropped and not clipped:
            return
        reasons = ", ".join(f"{count} {problem}" for problem, count in dropped.items())
        reasons = f" ({reasons})" if reasons else ""
        done = "would be" if self.test_mode else "are"
        message = (
            f"of {total} boxes {num_dropped} {done} dropped{reasons} and {clipped} {done} clipped to their image"
            f"{' in training' * self.test_mode}; a COCO bbox is [x, y, width, height] in pixels"
        )
        if num_dropped >= total:
            raise InvalidInputError(f"annotation file {self.ann_file}: {message}. No box is left.")
        self._warn(message)

    def filter_data(self) -> list[dict]:
        """Return the records that ``filter_cfg`` keeps."""
        if self.test_mode:
            return self.data_list
        return [
            record
            for record in self.data_list
            if min(record["width"], record["height"]) >= self._least_side
            and (not self._needs_box or _has_box(record))
        ]

    def _check_image_files(self) -> None:
        """Raise an error if image files are missing. Folders are listed, because looking up each file is slow."""
        if self.backend_args is not None:
            return
        names_in = functools.cache(_names_in)
        missing = []
        for record in self.data_list:
            path = record["img_path"]
            folder, name = os.path.split(path)
            if "://" not in folder and name not in names_in(folder):
                missing.append(path)
        if missing:
            alike = {hint: None for path in missing[:100] if (hint := _look_alike_on_disk(Path(path)))}
            raise MissingFileError(
                f"{type(self).__name__}: {len(missing)} of the {len(self.data_list)} images of "
                f"{self.ann_file} are missing: {listed(missing, 3)} (the folder is data_prefix['img'])"
                + (f". On the disk, {listed(alike, 3)}" if alike else "")
            )

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return the labels of the boxes and the crowd regions of image ``idx``."""
        return [instance["bbox_label"] for instance in self.get_data_info(idx)["instances"]]

    def prepare_data(self, idx: int) -> Any:
        """Return the output of the pipeline.

        Its transforms may read other images by ``draw_record``, with the first steps of ``pipeline``.
        """
        record = self.get_data_info(idx)
        return self.pipeline({**record, "draw_record": self.draw_record, "pipeline": self.pipeline})

    def draw_record(self) -> dict:
        """Return the record of an image that is drawn at random."""
        return self.get_data_info(self._rand_another())

    def _rand_another(self) -> int:
        # torch's generator is seeded in every worker process, but numpy's only if a seed is configured.
        return int(torch.randint(len(self), ()))

    def _warn(self, message: str) -> None:
        print_log(f"annotation file {self.ann_file}: {message}", logger="current", level=logging.WARNING)


def add_sizes(images: list[dict], folder: str, backend_args: dict | None = None) -> int:
    """Give the records of images without a width and a height those of their files, as viewers show them.

    Args:
        images: the records. folder: the folder of the images. backend_args: mmengine's file backend.

    Returns:
        the number of these records.
    """
    lacking = [image for image in images if lacks_size(image)]
    join_path = get_file_backend(folder).join_path
    for image in lacking:
        path = join_path(folder, image["file_name"])
        content = None if backend_args is None else fileio.get(path, backend_args=backend_args)
        with open_image(path, content) as picture:
            image["width"], image["height"] = sizes_of(picture)[0]
    return len(lacking)


@checked
def checked_filter_cfg(filter_empty_gt: bool = False, min_size: float = 0) -> tuple[bool, float]:
    return filter_empty_gt, min_size


def _has_box(record: dict) -> bool:
    """Return whether an image has a box that is no crowd."""
    return any(not instance["ignore_flag"] for instance in record["instances"])


def _names_in(folder: str) -> set[str]:
    """Return the names of the files in a folder, which may be missing."""
    place = folder or "."
    return set(os.listdir(place)) if os.path.isdir(place) else set()


def _look_alike_on_disk(path: Path) -> str | None:
    """Return which file or folder looks like the first part of a path that does not exist, and how it differs."""
    folder = path.parent
    if not folder.is_dir():
        return _look_alike_on_disk(folder) if folder != path else None
    return look_alike(path.name, os.listdir(folder))


def clip_box(annotation: dict, width: int, height: int) -> tuple[list[float] | None, str | None]:
    """Return a box (x1, y1, x2, y2) clipped to its image, and what is wrong with it.

    The box is ``None`` if it is not usable. The second value is ``None`` if nothing is wrong.
    """
    left, top, w, h = annotation["bbox"]
    if min(w, h) < _MIN_SIDE_PX:
        return None, f"under {_MIN_SIDE_PX:g} pixel wide or high"
    if box_area(annotation) <= 0:
        return None, "of zero area"
    right, bottom = left + w, top + h
    x1, y1, x2, y2 = max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))
    if x2 <= x1 or y2 <= y1:
        return None, "outside their image"
    overhang = max(-left, -top, right - width, bottom - height)
    return [x1, y1, x2, y2], "clipped" if overhang > _OVERHANG_PX else None
