"""Reading the JSON files of Label Studio: a list of tasks, whose rectangles may be turned."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch

from visdet.files.images import is_picture
from visdet.structures.coco_json import read_json
from visdet.structures.rotated_boxes import boxes_to_polygons

from .source import Picture, Source, checked_box, counted, files_below


def is_label_studio(file: Path) -> bool:
    """Return whether a JSON file holds a list, as that of Label Studio's tasks."""
    return file.read_bytes()[:100].lstrip().startswith(b"[")


def read_label_studio(source: Source) -> Iterator[Picture]:
    """Yield the picture of each task, with the rectangles of the first annotation that was not cancelled.

    A task without such an annotation is left out, since nobody has said that its image holds no object.
    """
    for file in filter(is_label_studio, files_below(source.root, "*.json")):
        for number, task in enumerate(read_json(file)):
            with counted(source.left_out.pictures, f"task {number} of {file}"):
                yield from _pictures(task, file, source)


def _pictures(task: dict[str, Any], file: Path, source: Source) -> Iterator[Picture]:
    path = _path_of(task["data"], file, source)
    picture = Picture(path)
    kept = (entry["result"] for entry in task["annotations"] if not entry.get("was_cancelled"))
    result = next(kept, None)
    if result is None:
        return
    for item in result:
        with counted(source.left_out.boxes, f"a region of {path} in {file}"):
            if item["type"] != "rectanglelabels" or item.get("image_rotation"):
                raise ValueError(f"{item['type']} of an image that may be rotated; rectanglelabels are read")
            value, size = item["value"], (item["original_width"], item["original_height"])
            picture.size = size
            picture.boxes.append(checked_box(value["rectanglelabels"][0], _points_of(value, size)))
    yield picture


def _path_of(data: dict[str, Any], file: Path, source: Source) -> Path:
    """Return the image of a task. Label Studio puts eight letters before the name of a file that is uploaded."""
    for value in data.values():
        place = unquote(str(value)).rsplit("?d=", 1)[-1]
        if is_picture(Path(place)):
            path = source.picture(place, file)
            return path if path.is_file() else source.picture(path.name.partition("-")[2], file)
    raise ValueError(f"its data name no image: {data!r:.200}")


def _points_of(value: dict[str, Any], size: tuple[int, int]) -> list[float]:
    """Return the four corners of a rectangle in pixels of an image of the (width, height) ``size``.

    Its sides are in percent of those of the image, and it is turned clockwise about its top left corner, in degrees.
    """
    keys = ("x", "y", "width", "height")
    x, y, w, h = (value[key] * side / 100 for key, side in zip(keys, size * 2, strict=True))
    box = torch.tensor([0, 0, w, h, math.radians(value.get("rotation", 0))], dtype=torch.float64)
    corners = boxes_to_polygons(box)
    return (corners - corners[0] + torch.tensor([x, y])).flatten().tolist()
