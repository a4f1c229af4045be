"""COCO files from YOLO folders, Pascal VOC, CSV tables and other COCO files, such as Roboflow exports them."""

import csv
import json
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from visdet.errors import InvalidInputError, MissingFileError, UserError, reading
from visdet.files.images import open_image, sizes_of
from visdet.files.writing import write_atomically
from visdet.structures.coco_json import load_coco_json

FORMATS = ("yolo", "voc", "csv", "coco")
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"}
_SPLIT = re.compile(r"(?<![a-z])(train|val|test)(ing|id|idation)?(?![a-z])")
_COLUMNS = {
    "image": ("image", "filename", "image_path", "file", "path", "file_name", "image_id"),
    "label": ("label", "class", "name", "category", "class_name"),
    **{
        side: (side, f"{side[0]}{1 if side[1:] == 'min' else 2}") for side in ("xmin", "ymin", "xmax", "ymax")
    },
}
_MAKER = "visdet convert"


@dataclass
class Picture:
    """An image of a data set.

    Attributes:
        path: the file. split: 'train', 'val', 'test', or '' if the data set does not say it.
        size: the (width, height) that the annotations give, if they do.
        boxes: for each object its class, its corners (x1, y1, x2, y2) and other entries of its annotation.
        is_relative: whether the corners are fractions of the width and the height.
    """

    path: Path
    split: str = ""
    size: tuple[float, float] | None = None
    boxes: list[tuple[str, list[float], dict[str, Any]]] = field(default_factory=list)
    is_relative: bool = False


def convert(
    root: Path, out: Path, kind: str | None = None, val_share: float = 0.2
) -> tuple[list[Path], list[str]]:
    """Write ``train.json``, ``val.json`` and ``test.json`` in COCO format, and return them and what was left out.

    Paths of images are relative to ``root``. Boxes are written as they are, also beyond their image.

    Args:
        root: the folder of the data set. out: the folder to write to.
        kind: one of FORMATS. By default, it is found by the files of the folder.
        val_share: the share of the images that becomes the validation split of a data set without splits.

    Raises:
        UserError: the folder holds no data set of the format, or a file of another maker is in the way.
    """
    root = root.resolve()
    kind = kind or _kind_of(root)
    skipped: Counter[str] = Counter()
    names: list[str] = []
    pictures = list(_READERS[kind](root, names, skipped))
    names = names or sorted({name for picture in pictures for name, *_ in picture.boxes})
    records: dict[str, list[tuple[Picture, tuple[int, int]]]] = defaultdict(list)
    for picture in pictures:
        try:
            with open_image(picture.path) as image:
                shown_size, stored_size = sizes_of(image)
            # The size is the one that viewers show, or as it is stored if the annotations say so.
            size = stored_size if picture.size == stored_size else shown_size
            records[picture.split].append((picture, size))
        except UserError as error:
            missing = "is missing" if isinstance(error, MissingFileError) else "cannot be read"
            skipped[f"image {picture.path} {missing}"] += 1
    if not any(records.values()):
        found = f"; left out: {', '.join(list(skipped)[:3])}" if skipped else ""
        raise InvalidInputError(f"{root} has no images with annotations in the format {kind}{found}")
    if "val" not in records and val_share:
        drawn = records["train" if "train" in records else ""]
        random.Random(0).shuffle(drawn)
        records["val"] = [drawn.pop() for _ in range(max(round(val_share * len(drawn)), 1))]
    if "" in records:
        records["train"] += records.pop("")
    files = []
    for split, images in records.items():
        file = out / f"{split}.json"
        if file.exists() and not _is_ours(file):
            raise UserError(f"{file} exists and was not written by {_MAKER}; give another folder")
        write_atomically(file, json.dumps(_coco(images, names, root)))
        files.append(file)
    return files, [f"{what} ({count} times)" if count > 1 else what for what, count in skipped.items()]


def _kind_of(root: Path) -> str:
    if not root.is_dir():
        raise InvalidInputError(f"{root} is not a folder")
    for kind, pattern in (
        ("yolo", "*.y*ml"),
        ("voc", "**/*.xml"),
        ("csv", "**/*.csv"),
        ("coco", "**/*.json"),
    ):
        if next(root.glob(pattern), None):
            return kind
    raise InvalidInputError(
        f"{root} has none of data.yaml (YOLO), *.xml (Pascal VOC), *.csv and *.json (COCO)"
    )


def _split_of(path: Path, root: Path) -> str:
    parts = [part.lower() for part in path.relative_to(root).with_suffix("").parts]
    return next((found[1] for part in reversed(parts) if (found := _SPLIT.search(part))), "")


def _is_ours(file: Path) -> bool:
    return f'"description": "{_MAKER}"' in file.read_text("utf-8")[:200]


def _coco(images: list[tuple[Picture, tuple[int, int]]], names: list[str], root: Path) -> dict[str, Any]:
    rows: list[dict] = []
    annotations: list[dict] = []
    for picture, (width, height) in images:
        name = os.path.relpath(picture.path, root)
        rows.append({"id": len(rows) + 1, "file_name": name, "width": width, "height": height})
        scale = (width, height) if picture.is_relative else (1, 1)
        for label, (x1, y1, x2, y2), others in picture.boxes:
            w, h = (x2 - x1) * scale[0], (y2 - y1) * scale[1]
            annotation: dict[str, Any] = {
                "id": len(annotations) + 1,
                "image_id": len(rows),
                "category_id": names.index(label) + 1,
            }
            annotation |= {"bbox": [x1 * scale[0], y1 * scale[1], w, h], "area": w * h, "iscrowd": 0}
            annotations.append(annotation | others)
    categories = [{"id": number, "name": name} for number, name in enumerate(names, start=1)]
    info = {"description": _MAKER}
    return {"info": info, "categories": categories, "images": rows, "annotations": annotations}


@contextmanager
def _left_out(skipped: Counter[str], what: str) -> Iterator[None]:
    """Count what the block cannot read, and go on."""
    try:
        yield
    except (ValueError, KeyError, ElementTree.ParseError) as error:
        skipped[f"{what}: {error}"] += 1


def _yolo(root: Path, names: list[str], skipped: Counter[str]) -> Iterator[Picture]:
    places = [root / "data.yaml", *sorted(root.glob("*.y*ml"))]
    table = next((place for place in places if place.is_file()), places[0])
    try:
        with reading(str(table)):
            data = yaml.safe_load(table.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{table} is not valid YAML: {error}") from error
    given = data.get("names") if isinstance(data, dict) else None
    if not isinstance(given, list | dict):
        raise InvalidInputError(f"{table} must have names, the list of the classes, got {given!r:.100}")
    numbered = dict(enumerate(given)) if isinstance(given, list) else {int(k): v for k, v in given.items()}
    names += map(str, numbered.values())
    has_outlines = "kpt_shape" not in data
    read: set[Path] = set()
    for split in ("train", "val", "test"):
        entries = data.get(split) or (data.get("valid") if split == "val" else None) or []
        for entry in map(str, entries if isinstance(entries, list) else [entries]):
            # Roboflow's paths begin with .. although the folders are beside data.yaml.
            bases = (root / str(data.get("path", "")), root)
            places = [base / part for base in bases for part in (entry, re.sub(r"^(\.\./)+", "", entry))]
            place = next((one for one in places if one.exists()), None)
            if place is None:
                skipped[f"{split} of {table.name}: there is no {entry}"] += 1
                continue
            files = (
                sorted(place.rglob("*"))
                if place.is_dir()
                else [
                    (place.parent / line.strip())
                    for line in place.read_text("utf-8").splitlines()
                    if line.strip()
                ]
            )
            for file in files:
                if file.suffix.lower() in _SUFFIXES:
                    head, found, tail = str(file).rpartition("/images/")
                    label = Path(f"{head}/labels/{tail}" if found else file).with_suffix(".txt")
                    read.add(label.resolve())
                    yield Picture(
                        file.resolve(), split, None, _yolo_boxes(label, numbered, has_outlines, skipped), True
                    )
    unread = [file for file in root.rglob("labels/**/*.txt") if file.resolve() not in read]
    skipped.update(f"{file} is of no image of a split" for file in sorted(unread))


def _yolo_boxes(label: Path, names: dict[int, Any], has_outlines: bool, skipped: Counter[str]) -> list:
    boxes: list[tuple[str, list[float], dict]] = []
    for number, line in enumerate(label.read_text("utf-8").splitlines() if label.exists() else (), start=1):
        with _left_out(skipped, f"line {number} of {label}, {line[:60]!r}, is no box of a class"):
            if line.strip():
                kind, *values = map(float, line.split())
                x, y, w, h = values[:4]
                corners = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
                if (
                    has_outlines and len(values) >= 6
                ):  # a box encloses an outline, and stands before key points
                    corners = [min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])]
                boxes.append((str(names[int(kind)]), corners, {}))
    return boxes


def _voc(root: Path, names: list[str], skipped: Counter[str]) -> Iterator[Picture]:
    lists = {file.stem: file.read_text("utf-8").split() for file in root.glob("**/ImageSets/Main/*.txt")}
    split_of = {stem: split for split in ("test", "val", "train") for stem in lists.get(split, ())}
    for file in sorted(root.rglob("*.xml")):
        with _left_out(skipped, str(file)):
            yield _voc_picture(file, root, split_of.get(file.stem), skipped)


def _voc_picture(file: Path, root: Path, split: str | None, skipped: Counter[str]) -> Picture:
    tree = ElementTree.parse(file)
    name = Path(tree.findtext("filename") or "").name or file.stem
    folders = (file.parent, file.parent.parent / "JPEGImages", file.parent.parent / "images")
    names = (name, *(f"{file.stem}{suffix}" for suffix in sorted(_SUFFIXES)))
    places = [folder / name for name in names for folder in folders]
    path = next((place for place in places if place.is_file()), places[0])
    width, height = (float(tree.findtext(f"size/{side}") or 0) for side in ("width", "height"))
    picture = Picture(path, split or _split_of(file, root), (width, height))
    for item in tree.iter("object"):
        label = item.findtext("name") or ""
        with _left_out(skipped, f"{file}: an object {label} has no bndbox of four numbers"):
            found = (item.findtext(f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax"))
            corners = [float(value or "nothing") for value in found]
            picture.boxes.append((label, corners, {"ignore": 1} if item.findtext("difficult") == "1" else {}))
    return picture


def _csv(root: Path, names: list[str], skipped: Counter[str]) -> Iterator[Picture]:
    for file in sorted(root.rglob("*.csv")):
        with _left_out(skipped, str(file)):
            yield from _csv_pictures(file, root, skipped)


def _csv_pictures(file: Path, root: Path, skipped: Counter[str]) -> Collection[Picture]:
    lines = file.read_text("utf-8-sig").splitlines()
    rows = csv.DictReader(lines, delimiter=max(",;\t", key="".join(lines[:1]).count))
    header = {(column or "").strip().lower(): column for column in rows.fieldnames or ()}
    columns = {key: next((header[n] for n in known if n in header), None) for key, known in _COLUMNS.items()}
    lacking = [key for key, column in columns.items() if column is None]
    if lacking:
        raise ValueError(f"there is no column {', '.join(lacking)}; the header is {', '.join(header)}")
    pictures: dict[str, Picture] = {}
    for number, row in enumerate(rows, start=2):
        image, label, *sides = ((row[column] or "").strip() for column in columns.values())
        picture = pictures.setdefault(
            image, Picture(_existing(file.parent, root, image), _split_of(file, root))
        )
        with _left_out(skipped, f"line {number} of {file}"):
            if any(sides):  # An image without boxes has a row without numbers.
                picture.boxes.append((label, [float(side.replace(",", ".")) for side in sides], {}))
    return pictures.values()


def _coco_files(root: Path, names: list[str], skipped: Counter[str]) -> Iterator[Picture]:
    for file in sorted(root.rglob("*.json")):
        if not _is_ours(file):
            with _left_out(skipped, str(file)):
                yield from _coco_pictures(file, root, names, skipped)


def _coco_pictures(file: Path, root: Path, names: list[str], skipped: Counter[str]) -> list[Picture]:
    content = load_coco_json(str(file))
    label_of = {category["id"]: category["name"] for category in content["categories"]}
    used = {label_of.get(annotation["category_id"]) for annotation in content["annotations"]}
    groups = {category.get("supercategory") for category in content["categories"]} - used
    skipped.update(f"category {name}, which only groups others" for name in groups & {*label_of.values()})
    names += dict.fromkeys(name for name in label_of.values() if name not in groups and name not in names)
    pictures = {}
    for image in content["images"]:
        path, size = _existing(file.parent, root, image["file_name"]), (image["width"], image["height"])
        pictures[image["id"]] = Picture(path, _split_of(file, root), size)
    for annotation in content["annotations"]:
        x, y, w, h = annotation["bbox"]
        if annotation["image_id"] not in pictures or annotation["category_id"] not in label_of:
            skipped[f"a box of {file} is of an image or a category that the file does not have"] += 1
            continue
        others = {
            key: annotation[key] for key in ("area", "iscrowd", "ignore") if annotation.get(key) is not None
        }
        label = label_of[annotation["category_id"]]
        pictures[annotation["image_id"]].boxes.append((label, [x, y, x + w, y + h], others))
    return list(pictures.values())


def _existing(folder: Path, root: Path, name: str) -> Path:
    """Return the file of an image that a table names, which is often in a folder beside the table."""
    places = [base / sub / name for base in (folder, root, folder.parent) for sub in ("", "images")]
    return next((place for place in places if place.is_file()), places[0])


_READERS = {"yolo": _yolo, "voc": _voc, "csv": _csv, "coco": _coco_files}
