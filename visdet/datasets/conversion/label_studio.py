"""Reading the JSON files of Label Studio: a list of tasks, whose rectangles may be turned."""

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from visdet.files.images import PICTURE_SUFFIXES
from visdet.structures.coco_json import read_json

from .source import Picture, Source, files_below, outlined


def is_label_studio(file: Path) -> bool:
    """Return whether a JSON file holds a list, as that of Label Studio's tasks."""
    return file.read_bytes()[:100].lstrip().startswith(b"[")


def read_label_studio(source: Source) -> Iterator[Picture]:
    """Yield the picture of each task, with the rectangles of the first annotation that was not cancelled."""
    for file in filter(is_label_studio, files_below(source.root, "*.json")):
        for number, task in enumerate(read_json(str(file))):
            with source.left_out.counted(source.left_out.pictures, f"task {number} of {file}"):
                yield _picture(task, file, source)


def _picture(task: dict[str, Any], file: Path, source: Source) -> Picture:
    path = _path_of(task["data"], file, source)
    picture = Picture(path, source.file_split(path))
    kept = [entry["result"] for entry in task["annotations"] if not entry.get("was_cancelled")]
    for item in kept[0] if kept else ():
        what = f"a region of {path} in {file}"
        with source.left_out.counted(source.left_out.boxes, what):
            if item["type"] != "rectanglelabels" or item.get("image_rotation"):
                raise ValueError(f"it is no rectangle of an image that is not rotated, but of {item['type']}")
            picture.size = (item["original_width"], item["original_height"])
            corners, others = outlined(_points_of(item["value"], *picture.size))
            picture.boxes.append((item["value"]["rectanglelabels"][0], corners, others))
    return picture


def _path_of(data: dict[str, Any], file: Path, source: Source) -> Path:
    """Return the image of a task. Label Studio puts eight letters before the name of a file that is uploaded."""
    for value in data.values():
        name = unquote(str(value)).rsplit("?d=", 1)[-1]
        if PurePosixPath(name).suffix.lower() in PICTURE_SUFFIXES:
            path = source.picture(name, file.parent)
            own = source.picture(PurePosixPath(name).name.partition("-")[2], file.parent)
            return own if own.is_file() and not path.is_file() else path
    raise ValueError(f"its data name no image: {data!r:.200}")


def _points_of(value: dict[str, Any], width: float, height: float) -> list[float]:
    """Return the four corners of a rectangle in pixels.

    Its sides are in percent of those of the image, and it is turned clockwise about its top left corner, in degrees.
    """
    x, w = value["x"] * width / 100, value["width"] * width / 100
    y, h = value["y"] * height / 100, value["height"] * height / 100
    angle = math.radians(value.get("rotation", 0))
    points = []
    for along, across in ((0, 0), (w, 0), (w, h), (0, h)):
        points += [
            x + along * math.cos(angle) - across * math.sin(angle),
            y + along * math.sin(angle) + across * math.cos(angle),
        ]
    return points
