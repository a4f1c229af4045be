"""Reading a COCO annotation file, with the checks that data sets and metrics share."""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mmengine.fileio import get_text

from visdet.checks.similar_names import look_alike
from visdet.errors import InvalidInputError, listed, reading

_REQUIRED_KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "annotations": ("id", "image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}


def load_coco_json(path: str, backend_args: dict | None = None, needs_annotations: bool = True) -> dict:
    """Return the content of a COCO annotation file, after its keys have been checked.

    Ids are numbers or texts, also mixed, and equal only if their types are: 1 is not "1". A number such as 7.0, which
    tables of floats give, is returned as 7.

    Args:
        path: a local path, or a URL that one of mmengine's file backends reads.
        backend_args: the choice of the backend, as in ``mmengine.fileio``.
        needs_annotations: ``False`` accepts a file without ``annotations``, such as one of test images, and adds an
            empty list.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not JSON, a key is missing, a value has another type than COCO's, ids repeat, or an id
            that an annotation refers to is written as another type. The message names the file and the mistake.

    Source: the format is https://cocodataset.org/#format-data.
    """
    with reading(f"annotation file {path}"):
        try:
            # Programs of Windows begin a file with a byte order mark.
            content = json.loads(get_text(path, "utf-8-sig", backend_args=backend_args))
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"annotation file {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidInputError(
            f"annotation file {path} must hold a JSON object, got a {type(content).__name__}"
        )
    if not needs_annotations:
        content.setdefault("annotations", [])
    for section, keys in _REQUIRED_KEYS.items():
        if not isinstance(content.get(section), list):
            found = ", ".join(sorted(content)) or "nothing"
            raise InvalidInputError(
                f"annotation file {path} needs a list under the key {section!r}; its keys are {found}"
            )
        _check_records(content[section], section, keys, path)
    for key, section in (("image_id", "images"), ("category_id", "categories")):
        ids = {record["id"] for record in content[section]}
        unknown = {annotation[key]: position for position, annotation in enumerate(content["annotations"])}
        for value, position in unknown.items():
            if value not in ids and (hint := written_otherwise(value, ids)):
                raise InvalidInputError(f"annotation file {path}: {key} of annotations[{position}] is {hint}")
    for section, fits, rule in _RULES:
        for record in content[section]:
            if not fits(record):
                raise InvalidInputError(f"annotation file {path}: {rule}: {record!r:.200}")
    content["categories"] = _without_groups(content)
    return content


# What the records of each section must fulfil.
_RULES: tuple[tuple[str, Callable[[dict], bool], str], ...] = (
    (
        "images",
        lambda it: _are_numbers(sides := [it["width"], it["height"]], 2) and min(sides) > 0,
        "width and height must be positive numbers",
    ),
    ("images", lambda it: it["width"] % 1 == 0 == it["height"] % 1, "width and height must be whole numbers"),
    ("images", lambda it: isinstance(it["file_name"], str), "file_name must be a text"),
    ("categories", lambda it: isinstance(it["name"], str), "the name of a category must be a text"),
    ("annotations", lambda it: _are_numbers(it["bbox"], 4), "bbox must be four finite numbers"),
    ("annotations", lambda it: it.get("area") is None or _is_number(it["area"]), "area must be a number"),
    ("annotations", lambda it: it.get("iscrowd") in (None, 0, 1), "iscrowd must be 0 or 1"),
    ("annotations", lambda it: it.get("ignore") in (None, 0, 1), "ignore must be 0 or 1"),
)


def _without_groups(content: dict) -> list[dict]:
    """Return the categories without those that only group others, have no box, and repeat a name, as Roboflow's may."""
    used = {annotation["category_id"] for annotation in content["annotations"]}
    categories = content["categories"]
    names = Counter(category["name"] for category in categories)
    groups = {category.get("supercategory") for category in categories}
    return [
        category
        for category in categories
        if names[category["name"]] == 1
        or category["id"] in used
        or category["name"] not in groups - {category.get("supercategory")}
    ]


def _are_numbers(values: object, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(_is_number, values))


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def _check_records(records: list, section: str, keys: Sequence[str], path: str) -> None:
    for position, record in enumerate(records):
        for key in keys:
            if not isinstance(record, dict) or key not in record:
                raise InvalidInputError(
                    f"annotation file {path}: {section}[{position}] has no key {key!r}: {record!r:.200}"
                )
            if key.endswith("id"):
                record[key] = _checked_id(
                    record[key], f"annotation file {path}: {key} of {section}[{position}]"
                )
    ((most_common, times),) = Counter(record["id"] for record in records).most_common(1) or [(None, 1)]
    if times > 1:
        raise InvalidInputError(f"annotation file {path}: id {most_common!r} occurs twice in {section!r}")


def _checked_id(value: Any, what: str) -> int | str:
    """Return an id, as a whole number or a text. A float such as 7.0 becomes 7."""
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    # Above 2 ** 53, several whole numbers are the same float.
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    raise InvalidInputError(
        f"{what} must be a whole number or a text, got {value!r:.100} ({type(value).__name__})"
    )


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
    label_of = {name: label for label, name in enumerate(classes)}
    names = [category["name"] for category in categories]
    repeated = min((name for name in names if name in label_of and names.count(name) > 1), default=None)
    if repeated is not None:
        ids = [repr(category["id"]) for category in categories if category["name"] == repeated]
        raise InvalidInputError(
            f"annotation file {path}: several categories are named {repeated}: ids {listed(ids)}. Give each a name of "
            "its own, or give all their boxes one category_id and remove the other categories"
        )
    matched = {
        category["id"]: label_of[category["name"]] for category in categories if category["name"] in label_of
    }
    spare = [name for name in names if name not in label_of]
    alike = [hint for name in classes if name not in names and (hint := look_alike(name, spare))]
    if alike:
        raise InvalidInputError(
            f"annotation file {path}: names of categories and classes are compared exactly, but category "
            f"{listed(alike, 3)}. Write the class as in the file: metainfo=dict(classes=(...))"
        )
    if not matched:
        raise InvalidInputError(
            f"annotation file {path}: none of its {len(names)} categories ({listed(names)}) is among the "
            f"{len(classes)} classes ({listed(classes)}). Name the file's categories in the config: "
            "metainfo=dict(classes=(...))."
        )
    return matched
