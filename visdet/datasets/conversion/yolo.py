"""Reading YOLO folders: data.yaml or classes.txt, images, and a text file of boxes for each image."""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from visdet.errors import InvalidInputError, listed
from visdet.files.images import is_picture
from visdet.files.yaml_text import load_yaml

from .source import Box, Picture, Source, checked_box, files_below, pictures_below, text_of

_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_IMAGES = re.compile(r"(?is)(.*/)images/")  # The last of the folders of this name becomes that of the labels.
_CLASSES = ("classes.txt", "obj.names")
_LABELS = ("labels", "annotations", "Labels")  # beside images; supervision's examples have the second one
_LEAST_OF_OUTLINE = 6  # numbers of an outline of three points


def yolo_tables(root: Path) -> list[Path]:
    """Return the YAML files of a folder that name classes, data.yaml first."""
    files = [root / "data.yaml", *sorted(root.glob("*.y*ml"))]
    return [file for file in files if file.is_file() and "names" in text_of(file, "replace")]


def lists_of_classes(root: Path) -> list[Path]:
    """Return the files with a line for each class that Label Studio, labelImg and CVAT write instead of data.yaml."""
    files = [file for name in _CLASSES for file in files_below(root, name)]
    if len({text_of(file).strip() for file in files}) > 1:
        raise InvalidInputError(f"{listed(files, 3)} differ; write data.yaml with the names of all classes")
    return files


def read_yolo(source: Source) -> Iterator[Picture]:
    """Yield the pictures of all splits."""
    root = source.root
    table, *_ = yolo_tables(root) or lists_of_classes(root) or [root / "data.yaml"]
    data = _content_of(table)
    names = _names_of(data, table)
    source.numbers = dict.fromkeys(map(str, names.values()))
    read_box = partial(_box, names=names, has_outlines="kpt_shape" not in data)
    read: set[Path] = set()
    for split, path in _files_of_splits(source, data, table):
        label = _label_of(path)
        read.add(label.resolve())
        picture = Picture(path.resolve(), split, is_relative=True)
        if label.is_file():
            picture.boxes += source.boxes_in_lines(label, read_box)
        yield picture
    # The images of labels that data.yaml does not name are counted as images in no list.
    for file in files_below(root, "[Ll]abels/**/*.txt"):
        if file.resolve() not in read and file.stem not in source.by_stem and file.name not in _CLASSES:
            source.left_out.pictures[f"{file} is of no image of a split"] += 1


def _content_of(table: Path) -> dict[str, Any]:
    if table.name in _CLASSES:
        return {"names": [line.strip() for line in text_of(table).strip().splitlines()]}
    try:
        data = load_yaml(text_of(table))
    except yaml.YAMLError as error:
        raise InvalidInputError(f"{table} is not valid YAML: {error}") from error
    return data if isinstance(data, dict) else {}


def _names_of(data: dict[str, Any], table: Path) -> dict[int, Any]:
    """Return the class of each number."""
    given = data.get("names")
    if isinstance(given, list):
        return dict(enumerate(given))
    try:
        return {int(number): name for number, name in given.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{table} must have names, the list of the classes, got {given!r:.100}"
        ) from error


def _files_of_splits(source: Source, data: dict[str, Any], table: Path) -> Iterator[tuple[str, Path]]:
    """Yield the split and the file of each image. Without a split in data.yaml, the folders say it."""
    has_splits = False
    for split, keys in _SPLITS.items():
        given: Any = next((data[key] for key in keys if data.get(key)), [])
        for entry in map(str, given if isinstance(given, list) else [given]):
            has_splits = True
            place = source.folder(entry, str(data.get("path") or "").replace("\\", "/"))
            paths: Iterable[Path] = ()
            if place is None:
                source.left_out.others[f"{split} of {table.name}: there is no {entry}"] += 1
            elif place.is_dir():
                paths = pictures_below(place)
            elif is_picture(place):
                paths = [place]
            else:
                paths = _listed(place, split, source)
            for path in paths:
                yield split, path
    if not has_splits:
        for path in source.pictures:
            yield source.file_split(path), path


def _listed(place: Path, split: str, source: Source) -> Iterator[Path]:
    """Yield the images that a text file lists."""
    for number, line in enumerate(text_of(place).splitlines(), start=1):
        if name := line.strip():
            path = source.picture(name, place, split)
            if path.is_file():
                yield path
            else:
                source.left_out.pictures[f"line {number} of {place}: there is no image {name}"] += 1


def _label_of(image: Path) -> Path:
    """Return the file of the boxes of an image, which is beside it or in a folder beside that of the images."""
    beside = str(image.with_suffix(".txt"))
    places = [Path(_IMAGES.sub(rf"\1{name}/", beside)) for name in _LABELS]
    return next((place for place in [*places, Path(beside)] if place.is_file()), places[0])


def _box(words: list[str], names: dict[int, Any], has_outlines: bool) -> Box:
    """Return a box, whose points are fractions of the width and the height."""
    kind, *points = map(float, words)
    x, y, w, h = points[:4]
    # A box encloses an outline, and stands before key points.
    if has_outlines and len(points) >= _LEAST_OF_OUTLINE:
        points = points[: len(points) // 2 * 2]  # A number after the last pair is a score.
    else:
        points = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
    return checked_box(str(names[int(kind)]), points)
