"""Reading COCO files that other programs have written."""

from collections.abc import Collection, Iterator
from pathlib import Path

from visdet.structures.coco_json import class_of_id, corners_of, grouping, load_coco_json, read_json

from .source import Picture, Source, files_below

MAKER = "visdet convert"
_KEPT = ("area", "iscrowd", "ignore")


def is_ours(file: Path) -> bool:
    """Return whether a COCO file was written by this program."""
    return f'"description": "{MAKER}"'.encode() in file.read_bytes()[:200]


def read_coco(source: Source) -> Iterator[Picture]:
    """Yield the pictures of all COCO files. Beside instances_*.json, the captions and key points are left out."""
    tables = files_below(source.root, "*.json")
    files = [file for file in tables if not is_ours(file)]
    instances = [file for file in files if file.stem.startswith("instances")]
    left_out = source.left_out.others
    if not files:
        left_out.update(f"{file}, which {MAKER} has written: train on it by a config" for file in tables)
    for file in files:
        if instances and file not in instances:
            left_out[f"{file}, since there is {instances[0].name}"] += 1
            continue
        match read_json(file):
            case {"images": _, "annotations": _}:
                yield from _pictures(file, source)
            case _:
                left_out[f"{file} is no COCO file: it has no lists of images and annotations"] += 1


def _pictures(file: Path, source: Source) -> Collection[Picture]:
    content = load_coco_json(file)
    label_of = class_of_id(content)
    groups = [category["id"] for category in grouping(content)]
    for number, name in label_of.items():
        if number in groups:
            source.left_out.others[f"category {name}, which only groups others"] += 1
        else:
            source.numbers.setdefault(name, number)
    split = source.table_split(file)
    pictures = {}
    for image in content["images"]:
        path = source.picture(image["file_name"], file, split)
        size = (image.get("width", 0), image.get("height", 0))
        number = image["id"]
        pictures[number] = Picture(path, split, size, number=number)
    for annotation in content["annotations"]:
        x, y, w, h = annotation["bbox"]
        picture = pictures.get(annotation["image_id"])
        label = label_of.get(annotation["category_id"])
        if picture is None or label is None:
            what = f"a box of {file} is of an image or a category that the file does not have"
            source.left_out.boxes[what] += 1
            continue
        others = {key: annotation[key] for key in _KEPT if annotation.get(key) is not None}
        if corners := corners_of(annotation):
            others["segmentation"] = [corners]
        picture.boxes.append((label, [x, y, x + w, y + h], others))
    return pictures.values()
