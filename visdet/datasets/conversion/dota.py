"""Reading DOTA: a text file for each image, with the four corners, the class and the difficulty of each object."""

from collections.abc import Iterator
from pathlib import Path

from .source import Picture, Source, files_below, outlined, text_of

# The folders of DOTA, and of the tiles that mmrotate cuts from it.
_FOLDERS = ("labelTxt", "annfiles")
_HEADERS = ("imagesource:", "gsd:")
_UPRIGHT = "hbb"  # The folders of DOTA with the upright boxes of the same objects are named so.


def dota_files(root: Path) -> list[Path]:
    """Return the text files of a folder that are in one of DOTA's folders."""
    found = []
    for file in files_below(root, "*.txt"):
        folders = file.relative_to(root).parts[:-1]
        if any(folder.startswith(_FOLDERS) for folder in folders) and _UPRIGHT not in str(folders):
            found.append(file)
    return found


def read_dota(source: Source) -> Iterator[Picture]:
    """Yield the picture of each text file. Difficult objects get ``ignore``."""
    for file in dota_files(source.root):
        split = source.file_split(file)
        picture = Picture(source.picture_like(file, split), split)
        for number, line in enumerate(text_of(file).splitlines(), start=1):
            with source.left_out.counted(source.left_out.boxes, f"line {number} of {file}, {line[:60]!r}"):
                if line.strip() and not line.startswith(_HEADERS):
                    *points, label, difficult = line.split()
                    if len(points) != 8:
                        raise ValueError("an object has x1 y1 x2 y2 x3 y3 x4 y4 class difficult")
                    corners, others = outlined([float(point) for point in points])
                    picture.boxes.append((label, corners, others | {"ignore": int(difficult != "0")}))
        yield picture
