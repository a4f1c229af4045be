"""Reading a COCO annotation file, with the checks that data sets and metrics share."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine import fileio

from visdet.checks.similar_names import look_alike
from visdet.errors import InvalidInputError, listed, reading

from .rotated_boxes import boxes_to_polygons

_REQUIRED_KEYS = {
    "images": ("id", "file_name"),
    "annotations": ("id", "image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}
# An image that has one of its sides needs the other, too.
_KEYS_WITH_SIDES = {**_REQUIRED_KEYS, "images": ("id", "file_name", "height", "width")}


def load_coco_json(
    path: str | Path, backend_args: dict | None = None, needs_annotations: bool = True
) -> dict:
    """Return the content of a COCO annotation file, after its keys have been checked.

    A ``bbox`` of five numbers is a turned box as detectron2 has it: the centre, the width and the height in pixels, and
    the angle in degrees, which turns counter-clockwise. The annotation gets the four corners as its ``segmentation``,
    unless it has one, and the upright box around them as its ``bbox``.

    Ids are numbers or texts, also mixed, and equal only if their types are: 1 is not "1". A number such as 7.0, which
    tables of floats give, is returned as 7. Images may lack both ``width`` and ``height`` (see :func:`lacks_size`).

    Args:
        path: a local path, or a URL that one of mmengine's file backends reads. The text is UTF-8, UTF-16 or UTF-32.
        backend_args: the choice of the backend, as in ``mmengine.fileio``.
        needs_annotations: ``False`` accepts a file without ``annotations``, such as one of test images, and adds an
            empty list.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not JSON, a key is missing, a value has another type than COCO's, ids repeat, or an id
            that an annotation refers to is written as another type. The message names the file and the first mistake.

    Source: the format is https://cocodataset.org/#format-data.
    """
    content = read_json(path, backend_args)
    faults = faults_of(content, needs_annotations)
    if faults:
        more = f". It has {len(faults) - 1} more faults, which visdet check-data lists" if faults[1:] else ""
        raise InvalidInputError(f"annotation file {path}{faults[0]}{more}")
    names = Counter(category["name"] for category in content["categories"])
    for category in grouping(content):
        if names[category["name"]] > 1:  # Roboflow's may repeat the name of the one that has the boxes.
            content["categories"].remove(category)
    for annotation in content["annotations"]:
        if len(annotation["bbox"]) == 5:
            _straighten(annotation)
    return content


def read_json(path: str | Path, backend_args: dict | None = None) -> Any:
    """Return the content of a JSON file, which is not checked (see :func:`load_coco_json`)."""
    with reading(f"annotation file {path}"):
        content = fileio.get(path, backend_args=backend_args)
    try:
        # Programs of Windows begin a file with a byte order mark, or write UTF-16, which json finds out.
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"annotation file {path} is not valid JSON: {error}") from error


def faults_of(content: Any, needs_annotations: bool = True) -> list[str]:
    """Return the mistakes in the content of a COCO file, each as the end of a message that begins with its name.

    Ids become whole numbers or texts. Values are compared if every record has its keys.
    """
    if not isinstance(content, dict):
        return [f" must hold a JSON object, got a {type(content).__name__}"]
    if not needs_annotations:
        content.setdefault("annotations", [])
    faults: list[str] = []
    for section in _REQUIRED_KEYS:
        if isinstance(content.get(section), list):
            faults += _key_faults(content[section], section)
        else:
            found = ", ".join(sorted(content)) or "nothing"
            faults.append(f" needs a list under the key {section!r}; its keys are {found}")
    return faults or [*_reference_faults(content), *_value_faults(content), *_angle_faults(content)]


def _key_faults(records: list, section: str) -> Iterator[str]:
    """Yield which records lack a key or have an id that is none, and which id repeats."""
    ids: Counter[int | str] = Counter()
    for position, record in enumerate(records):
        given = record if isinstance(record, dict) else {}
        keys_of = _REQUIRED_KEYS if lacks_size(given) else _KEYS_WITH_SIDES
        for key in keys_of[section]:
            if key not in given:
                yield f": {section}[{position}] has no key {key!r}: {record!r:.200}"
                break
            if key.endswith("id"):
                value = given[key]
                given[key] = _whole_id(value)
                if given[key] is None:
                    kind = type(value).__name__
                    what = f"{key} of {section}[{position}]"
                    yield f": {what} must be a whole number or a text, got {value!r:.100} ({kind})"
        else:
            ids[given["id"]] += 1
    for value, times in ids.items():
        if times > 1 and value is not None:
            yield f": id {value!r} occurs twice in {section!r}"


def lacks_size(image: Mapping[str, Any]) -> bool:
    """Return whether the record of an image has neither a width nor a height, so that its file must say them."""
    return image.get("width") is None and image.get("height") is None


def _whole_id(value: Any) -> int | str | None:
    """Return an id as a whole number or a text, or None if it is neither. A float such as 7.0 becomes 7."""
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    # Above 2 ** 53, several whole numbers are the same float.
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else None


def _reference_faults(content: dict) -> Iterator[str]:
    """Yield which annotations refer to an id that is written as another type."""
    for key, section in (("image_id", "images"), ("category_id", "categories")):
        ids = {record["id"] for record in content[section]}
        unknown = {row[key]: position for position, row in enumerate(content["annotations"])}
        for value, position in unknown.items():
            if value not in ids and (hint := written_otherwise(value, ids)):
                yield f": {key} of annotations[{position}] is {hint}"


def _value_faults(content: dict) -> Iterator[str]:
    """Yield which records have a value that cannot be used."""
    for section, faults_in in (
        ("images", _fault_in_image),
        ("categories", _fault_in_category),
        ("annotations", _fault_in_annotation),
    ):
        for record in content[section]:
            fault = faults_in(record)
            if fault:
                yield f": {fault}: {record!r:.200}"


def _angle_faults(content: dict) -> Iterator[str]:
    """Yield that angles are probably in radians, which other programs than detectron2 write."""
    boxes = [row["bbox"] for row in content["annotations"] if "segmentation" not in row]
    angles = [abs(box[4]) for box in boxes if _are_numbers(box, 5)]
    if angles and 0 < max(angles) <= 2 * math.pi:
        yield (
            f": the angles of its boxes of five numbers must be in degrees and turn counter-clockwise, but none is "
            f"above {max(angles):.4g}, as if they were in radians. Write a segmentation of the four corners instead"
        )


def _straighten(annotation: dict) -> None:
    """Replace a bbox of five numbers by the upright box around it, and add its corners as the segmentation."""
    x, y, width, height, degrees = annotation["bbox"]
    box = torch.tensor([x, y, width, height, -math.radians(degrees)], dtype=torch.float64)
    corners = boxes_to_polygons(box).flatten().tolist()
    annotation.setdefault("segmentation", [corners])
    annotation.setdefault("area", width * height)
    annotation["bbox"] = enclosing_bbox(corners)


def enclosing_bbox(corners: Sequence[float]) -> list[float]:
    """Return the upright box [x, y, width, height] around points (x1, y1, x2, y2, ...)."""
    xs, ys = corners[::2], corners[1::2]
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def corners_of(annotation: Mapping[str, Any]) -> list[float] | None:
    """Return the ``segmentation`` of an annotation (x1, y1, ..., x4, y4), or None if it is not one of four points.

    A fifth point that closes the outline is left out.
    """
    match annotation.get("segmentation"):
        case [list(outline)]:
            corners = outline[:8] if outline[8:] == outline[:2] else outline
            return corners if _are_numbers(corners, 8) else None
    return None


def needed_corners(annotation: Mapping[str, Any], what: str) -> list[float]:
    """Return :func:`uncrossed` :func:`corners_of` an annotation, which ``what`` names in the error if it has none."""
    corners = corners_of(annotation)
    if corners is None:
        raise InvalidInputError(
            f"{what} has no segmentation of four points [[x1, y1, ..., x4, y4]] and no bbox of five numbers: "
            f"{annotation!r:.300}. Upright boxes are for CocoMetric and a model that finds them, such as dino-small"
        )
    return uncrossed(corners)


def uncrossed(corners: list[float]) -> list[float]:
    """Return the outline (x1, y1, ..., x4, y4) with its corners in order around it, if two of its sides cross."""
    a, b, c, d = map(complex, corners[::2], corners[1::2])
    if _cross(a, b, c, d):
        points = [a, c, b, d]
    elif _cross(b, c, d, a):
        points = [a, b, d, c]
    else:
        return corners
    return np.array(points).view(float).tolist()


def _cross(a: complex, b: complex, c: complex, d: complex) -> bool:
    """Return whether the lines from a to b and from c to d cross between their ends."""
    return _side(a, b, c) * _side(a, b, d) < 0 and _side(c, d, a) * _side(c, d, b) < 0


def _side(a: complex, b: complex, c: complex) -> float:
    """Return a number whose sign says on which side of the line from a to b the point c is."""
    return ((b - a).conjugate() * (c - a)).imag


def _fault_in_image(image: dict) -> str | None:
    if not isinstance(image["file_name"], str):
        return "file_name must be a text"
    if lacks_size(image):
        return None
    sides = [image["width"], image["height"]]
    if not _are_numbers(sides, 2) or min(sides) <= 0:
        return "width and height must be positive numbers"
    return None if all(side % 1 == 0 for side in sides) else "width and height must be whole numbers"


def _fault_in_category(category: dict) -> str | None:
    return None if isinstance(category["name"], str) else "the name of a category must be a text"


def _fault_in_annotation(annotation: dict) -> str | None:
    if not _are_numbers(annotation["bbox"], 4, 5):
        return "bbox must be four finite numbers, or five for a turned box"
    if not (annotation.get("area") is None or _is_number(annotation["area"])):
        return "area must be a number"
    for key in ("iscrowd", "ignore"):
        if annotation.get(key) not in (None, 0, 1):
            return f"{key} must be 0 or 1"
    return None


def grouping(content: dict) -> list[dict]:
    """Return the categories that only group others: they have no box, and others have them as their supercategory."""
    used = {annotation["category_id"] for annotation in content["annotations"]}
    categories = content["categories"]
    groups = {category.get("supercategory") for category in categories}
    return [
        category
        for category in categories
        if category["id"] not in used and category["name"] in groups - {category.get("supercategory")}
    ]


def class_of_id(content: dict) -> dict[int | str, str]:
    """Return the name of each category by its id."""
    return {category["id"]: category["name"] for category in content["categories"]}


def _are_numbers(values: object, *counts: int) -> bool:
    """Return whether a value is a list of finite numbers, which has one of the lengths."""
    return isinstance(values, list) and len(values) in counts and all(map(_is_number, values))


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def written_otherwise(value: int | str, ids: Collection[int | str]) -> str | None:
    """Return a phrase that says that ``ids`` has the id ``value`` as the other type, or None if it does not."""
    other = next((one for one in ids if str(one) == str(value).strip().removesuffix(".0")), value)
    if type(other) is type(value):
        return None
    types = ["a text" if isinstance(one, str) else "a number" for one in (value, other)]
    return f"{value!r} ({types[0]}), but the id is {other!r} ({types[1]}); write both alike"


def is_ignored(annotation: Mapping[str, Any]) -> bool:
    """Return whether a box need not be found and makes no detection on it wrong: ``iscrowd`` or ``ignore``."""
    return bool(annotation.get("iscrowd") or annotation.get("ignore"))


def box_area(annotation: Mapping[str, Any]) -> float:
    """Return the ``area`` of an annotation, which is that of its box if the file does not give it."""
    _, _, width, height = annotation["bbox"]
    area = annotation.get("area")
    return width * height if area is None else area


def id_order(value: int | str) -> tuple[bool, int | str]:
    """Return the key that sorts ids: numbers by their values, and then texts."""
    return isinstance(value, str), value


def match_categories(categories: Sequence[dict], classes: Sequence[str], path: str) -> dict[int | str, int]:
    """Return {category id of the file: label}.

    The label is the position of the category's name in ``classes``. The order and the ids in the file do not matter.

    Args:
        categories: the ``categories`` of the file.
        classes: the names of the classes.
        path: the file, for messages.

    Raises:
        ValueError: two categories have the same name of ``classes``, a class that the file lacks looks like one of its
            categories (see :func:`look_alike`), or none of the classes is in the file.
    """
    ids_of: defaultdict[str, list[int | str]] = defaultdict(list)
    for category in categories:
        ids_of[category["name"]].append(category["id"])
    matched: dict[int | str, int] = {}
    for label, name in enumerate(classes):
        ids = ids_of[name]
        if len(ids) > 1:
            raise InvalidInputError(
                f"annotation file {path}: several categories are named {name}: ids {listed(map(repr, ids))}. Give each "
                "a name of its own, or give all their boxes one category_id and remove the other categories"
            )
        matched |= dict.fromkeys(ids, label)
    spare = [name for name in ids_of if name not in classes]
    alike = [hint for name in classes if not ids_of[name] and (hint := look_alike(name, spare))]
    if alike:
        raise InvalidInputError(
            f"annotation file {path}: names of categories and classes are compared exactly, but category "
            f"{listed(alike, 3)}. Write the class as in the file: metainfo=dict(classes=(...))"
        )
    if not matched:
        raise InvalidInputError(
            f"annotation file {path}: none of its {len(categories)} categories ({listed(spare)}) is among the "
            f"{len(classes)} classes ({listed(classes)}). Name the file's categories in the config: "
            "metainfo=dict(classes=(...))."
        )
    return matched
