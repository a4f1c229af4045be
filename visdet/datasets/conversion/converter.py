"""Writing the COCO files of a data set in another format."""

import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from visdet.checks.arguments import Share, checked
from visdet.errors import InvalidInputError, MissingFileError, UserError, listed
from visdet.files.images import extra_frames, open_image, sizes_of
from visdet.files.writing import write_atomically
from visdet.structures.coco_json import corners_of, enclosing_bbox, uncrossed

from .coco_files import MAKER, is_ours, read_coco
from .csv_tables import read_csv
from .dota import dota_files, read_dota
from .label_studio import is_label_studio, read_label_studio
from .source import Picture, Source, files_below
from .voc import read_voc
from .yolo import lists_of_classes, read_yolo, yolo_tables

_READERS = {
    "yolo": read_yolo,
    "voc": read_voc,
    "csv": read_csv,
    "coco": read_coco,
    "dota": read_dota,
    "label-studio": read_label_studio,
}
FORMATS = tuple(_READERS)
_NUMBERS_OF_CORNERS = 4  # of an upright box


@checked
def convert(
    root: Path,
    out: Path,
    kind: str | None = None,
    val_share: Share = 0.2,
    left_out_share: Share = 0.1,
) -> tuple[list[Path], list[str]]:
    """Write ``train.json``, ``val.json`` and ``test.json`` in COCO format, those for which there are pictures.

    The others of these files that an earlier conversion has written stay, and the lines name them: their pictures may
    be of another split now.

    Paths of images are relative to ``root``. The category ids of COCO files stay. Boxes are written as they are, also
    beyond their image. Outlines of four points stay as the ``segmentation``, which ``box_type='rbox'`` of a CocoDataset
    reads, with their corners put in order where two sides cross. The split of an image is that of its table, or that
    which one of its folders says; its own name says nothing.

    Args:
        root: the folder of the data set. out: the folder to write to.
        kind: one of FORMATS. By default, it is found by the files of the folder.
        val_share: the share of the training images that becomes the validation split of a data set without one.
        left_out_share: the greatest share of the pictures, and of the boxes, that may be left out.

    Returns:
        the files, a line for each kind of possible mistake, and one for each thing that was left out, of which the last
        one counts them.

    Raises:
        UserError: a share is not from 0 to 1, the folder holds no data set of the format, too much of it cannot be
            converted, or a file of another maker is in the way. Nothing is written then.
    """
    root = root.resolve()
    source = Source(root)
    kind = kind or _kind_of(root)
    read = list(_READERS[kind](source))
    pictures = _readable(read, source)
    left_out = source.left_out
    if not pictures:
        lines = left_out.lines()
        found = f"; left out: {listed(lines, 3)}" if lines else ""
        raise InvalidInputError(f"{root} has no images with annotations in the format {kind}{found}")
    named = {picture.path.resolve() for picture in read}
    unnamed = [path for path in source.pictures if path.resolve() not in named]
    left_out.others[f"an image without annotations, or in no list of a split: {listed(unnamed, 3)}"] += len(
        unnamed
    )
    num_boxes = sum(len(picture.boxes) for picture in pictures)
    summary, share = left_out.summary(len(pictures), num_boxes)
    if share > left_out_share:
        lost = left_out.pictures + left_out.boxes
        raise InvalidInputError(
            f"{root}: {summary}, more than --left-out-share {left_out_share:g}; nothing is written. First: "
            f"{listed(lost, 3)}"
        )
    splits = _by_split(pictures, val_share, source)
    numbers: dict[str, Any] = source.numbers or dict.fromkeys(_names_in(pictures))
    if len({number for number in numbers.values() if isinstance(number, int)}) < len(numbers):
        numbers = {name: number for number, name in enumerate(numbers, start=1)}
    texts = {
        out / f"{split}.json": json.dumps(_coco(images, numbers, root, left_out.remarks))
        for split, images in splits.items()
    }
    for file in texts:
        if file.exists() and not is_ours(file):
            raise UserError(f"{file} exists and was not written by {MAKER}; give another folder")
    for file, text in texts.items():
        write_atomically(file, text)
    for split in ("train", "val", "test"):
        file = out / f"{split}.json"
        if file not in texts and file.is_file() and is_ours(file):
            left_out.remarks[
                "files of an earlier conversion, whose pictures may be of another split now"
            ].append(file)
    lines = left_out.lines()
    return list(texts), [*left_out.remark_lines(), *lines, *([summary] if lines else [])]


def _kind_of(root: Path) -> str:
    if not root.is_dir():
        raise InvalidInputError(f"{root} is not a folder")
    if dota_files(root) and not files_below(root, "labels/**/*.txt"):
        return "dota"
    if yolo_tables(root):
        return "yolo"
    for kind, pattern in (("voc", "*.xml"), ("csv", "*.csv")):
        if files_below(root, pattern):
            return kind
    if lists_of_classes(root):
        return "yolo"
    if tables := files_below(root, "*.json"):
        others = [file for file in tables if not is_ours(file)]
        return "label-studio" if others and all(map(is_label_studio, others)) else "coco"
    raise InvalidInputError(
        f"{root} has none of data.yaml and classes.txt (YOLO), *.xml (Pascal VOC), *.csv, *.json (COCO, Label Studio) "
        "and labelTxt/*.txt (DOTA)"
    )


def _names_in(pictures: Iterable[Picture]) -> list[str]:
    """Return the names of all classes that have a box, in the order of the alphabet."""
    names = set()
    for picture in pictures:
        names |= {name for name, *_ in picture.boxes}
    return sorted(names)


def _readable(pictures: Iterable[Picture], source: Source) -> list[Picture]:
    """Return the pictures that can be opened, and give them the sizes of their files."""
    left_out = source.left_out
    found = []
    for picture in pictures:
        path, said_size = picture.path, picture.size
        try:
            with open_image(path) as image:
                shown_size, stored_size = sizes_of(image)
                more = extra_frames(image)
        except UserError as error:
            missing = (
                "is missing, or several have its name"
                if isinstance(error, MissingFileError)
                else "cannot be read"
            )
            left_out.pictures[f"image {path} {missing}"] += 1
            left_out.boxes["boxes of images that are missing or cannot be read"] += len(picture.boxes)
            continue
        if more:
            left_out.others[f"pages or frames of {path} after the first"] += more
        if all(said_size) and said_size not in (shown_size, stored_size):
            has, says = ("{:g}x{:g}".format(*size) for size in (shown_size, said_size))
            what = f"{path} has {has} and not {says}"
            left_out.remarks["widths and heights that are not those of the image"].append(what)
        # The size is the one that viewers show, or as it is stored if the annotations say so.
        picture.size = stored_size if said_size == stored_size else shown_size
        found.append(picture)
    return found


def _by_split(pictures: Iterable[Picture], val_share: float, source: Source) -> dict[str, list[Picture]]:
    """Return the pictures of each split that has some.

    The split of a picture is that of a table, or else that of its folder. Those of no split are for training. A part of
    the training pictures becomes the validation split if there is none. This and pictures of several splits are added
    to the remarks.
    """
    remarks = source.left_out.remarks
    splits: dict[str, list[Picture]] = defaultdict(list)
    for picture in pictures:
        splits[picture.split or source.file_split(picture.path) or "train"].append(picture)
    training = splits.get("train", [])
    count = len(training)
    if "val" not in splits and val_share and count > 1:
        training.sort(key=partial(_drawn, source.root))
        number = min(max(round(val_share * count), 1), count - 1)
        splits["val"] = [training.pop() for _ in range(number)]
        drawn = "images that are drawn at random for validation, because the data set has none for it"
        remarks[drawn] += [picture.path for picture in splits["val"]]
    splits_of: dict[Path, dict[str, None]] = defaultdict(dict)
    for split, images in splits.items():
        for picture in images:
            splits_of[picture.path.resolve()][split] = None
    for path, found in splits_of.items():
        if len(found) > 1:
            remarks[f"images that are for {' and for '.join(found)}"].append(path)
    return splits


def _drawn(root: Path, picture: Picture) -> float:
    """Return a random number for a picture, which depends on its path within ``root`` alone.

    Pictures that come later then bring hardly any that has been trained on into the validation split.
    """
    return random.Random(os.path.relpath(picture.path, root)).random()


def _coco(
    pictures: list[Picture], numbers: dict[str, Any], root: Path, remarks: dict[str, list[object]]
) -> dict[str, Any]:
    """Return the content of a COCO file. ``numbers`` are the category ids of the classes."""
    rows: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    given_ids = {picture.number for picture in pictures}
    are_ids = None not in given_ids and len(given_ids) == len(pictures)
    for picture in pictures:
        image_id = picture.number if are_ids else len(rows) + 1
        width, height = picture.size
        name = os.path.relpath(picture.path, root)
        rows.append({"id": image_id, "file_name": name, "width": width, "height": height})
        scales = picture.size if picture.is_relative else (1, 1)
        for label, points, others in picture.boxes:
            points = [side * scale for side, scale in zip(points, cycle(scales), strict=False)]
            bbox = enclosing_bbox(points)
            if len(points) == _NUMBERS_OF_CORNERS:  # which may be in the wrong order
                x1, y1, x2, y2 = points
                bbox = [x1, y1, x2 - x1, y2 - y1]
            annotation = {
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": numbers[label],
                "bbox": bbox,
                "area": bbox[2] * bbox[3],
                "iscrowd": 0,
                **others,
            }
            given = corners_of({"segmentation": [points], **others})
            if given:
                corners = uncrossed(given)
                annotation["segmentation"] = [corners]
                if corners != given:
                    remarks["outlines that cross themselves, whose corners are put in order"].append(
                        f"id {annotation['id']} in {name}"
                    )
            annotations.append(annotation)
    categories = [{"id": number, "name": name} for name, number in numbers.items()]
    info = {"description": MAKER}
    return {"info": info, "categories": categories, "images": rows, "annotations": annotations}
