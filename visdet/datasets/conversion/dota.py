"""Reading DOTA: a text file for each image, with the four corners, the class and the difficulty of each object."""

from collections.abc import Iterator
from pathlib import Path

from .source import Box, Picture, Source, checked_box, files_below

# The folders of DOTA, and of the tiles that mmrotate cuts from it.
_FOLDERS = ("labelTxt", "annfiles")
_HEADERS = ("imagesource:", "gsd:")
_UPRIGHT = "hbb"  # The folders of DOTA with the upright boxes of the same objects are named so.


def dota_files(root: Path) -> list[Path]:
    """Return the text files of a folder that are in one of DOTA's folders."""
    found = {file for folder in _FOLDERS for file in files_below(root, f"{folder}*/**/*.txt")}
    return sorted(file for file in found if _UPRIGHT not in str(file.relative_to(root).parent))


def read_dota(source: Source) -> Iterator[Picture]:
    """Yield the picture of each text file. Difficult objects get ``ignore``."""
    for file in dota_files(source.root):
        split = source.file_split(file)
        boxes = list(source.boxes_in_lines(file, _box, _HEADERS))
        yield Picture(source.picture_like(file, split), split, boxes=boxes)


def _box(words: list[str]) -> Box:
    *points, label, difficult = words
    if len(points) != 8:
        raise ValueError("an object has x1 y1 x2 y2 x3 y3 x4 y4 class difficult")
    return checked_box(label, points, ignore=int(difficult != "0"))
