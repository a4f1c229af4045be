"""The folder of a data set that is converted: its pictures, where they are, and what of it is left out."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any
from xml.etree import ElementTree

from visdet.errors import InvalidInputError, listed, reading
from visdet.files.images import is_picture

_SPLIT = re.compile(r"(?<![a-z])(train|val|test)(ing|id|idation)?(?![a-z])")
_LEAST_FOLDERS = (
    2  # that the end of a path of another computer must name, so that it is not taken for another folder
)


Box = tuple[str, list[float], dict[str, Any]]  # see Picture.boxes


@dataclass
class Picture:
    """An image of a data set.

    Attributes:
        path: the file. split: 'train', 'val', 'test', or '' if no table says it.
        size: the (width, height) that the annotations give, with a 0 for what they do not give.
        boxes: for each object its class, its corners (x1, y1, x2, y2) or the points (x1, y1, x2, y2, x3, ...) of its
            outline, and other entries of its annotation. An outline of four points is that of a turned box.
        is_relative: whether the points are fractions of the width and the height.
        number: the id of the image, or None if the annotations give none.
    """

    path: Path
    split: str = ""
    size: tuple[float, float] = (0, 0)
    boxes: list[Box] = field(default_factory=list)
    is_relative: bool = False
    number: Any = None


class LeftOut:
    """What cannot be converted, in a line for each thing, and what may be a mistake.

    Attributes:
        pictures: pictures that are lost. boxes: boxes that are lost, those of lost pictures too.
        others: what loses neither, such as a folder that a table names and that is not there.
        remarks: what is converted and may be a mistake, with the places of each kind.
    """

    def __init__(self) -> None:
        self.pictures: Counter[str] = Counter()
        self.boxes: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.remarks: defaultdict[str, list[object]] = defaultdict(list)

    def remark_lines(self) -> list[str]:
        """Return a line for each kind of remark, with how often it occurs and its first places."""
        return [f"{what}: {len(found)} ({listed(found, 3)})" for what, found in self.remarks.items()]

    def lines(self) -> list[str]:
        """Return a line for each thing that is left out, with how often it occurs."""
        counts = self.pictures + self.boxes + self.others
        return [f"{what} ({count} times)" if count > 1 else what for what, count in counts.items()]

    def summary(self, num_pictures: int, num_boxes: int) -> tuple[str, float]:
        """Return how many of all pictures and boxes are left out, and the share of either, of which that is larger.

        The numbers are those that are kept, of which that of the pictures is not 0.
        """
        pictures, boxes, others = self.pictures.total(), self.boxes.total(), self.others.total()
        all_pictures, all_boxes = pictures + num_pictures, boxes + num_boxes
        text = f"left out {pictures} of {all_pictures} pictures and {boxes} of {all_boxes} boxes"
        text += f", and {others} other things" if others else ""
        return text, max(pictures / all_pictures, boxes / max(all_boxes, 1))


@contextmanager
def counted(kind: Counter[str], what: object) -> Iterator[None]:
    """Count what the block cannot read as one of a kind of :class:`LeftOut`, and go on."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ElementTree.ParseError) as error:
        kind[f"{what}: {error}"] += 1


class Source:
    """The folder of a data set.

    Attributes:
        root: the folder.
        numbers: the classes in the order that the data set gives them, if it does, with their category ids, if it has
            them.
        left_out: what of the data set cannot be read.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.numbers: dict[str, int | str | None] = {}
        self.left_out = LeftOut()

    @cached_property
    def pictures(self) -> list[Path]:
        """All image files in the folder and below it."""
        return pictures_below(self.root)

    @cached_property
    def by_stem(self) -> dict[str, list[Path]]:
        """The image files, by their names without the suffixes."""
        found: dict[str, list[Path]] = {}
        for path in self.pictures:
            found.setdefault(path.stem, []).append(path)
        return found

    def boxes_in_lines(
        self, file: Path, read: Callable[[list[str]], Box], headers: tuple[str, ...] = ()
    ) -> Iterator[Box]:
        """Yield the box that ``read`` makes of the words of each line of a file that is neither empty nor a header."""
        for number, line in enumerate(text_of(file, "replace").splitlines(), start=1):
            what = f"line {number} of {file}, {line[:60]!r}, is no box of a class"
            with counted(self.left_out.boxes, what):
                if "\N{REPLACEMENT CHARACTER}" in line:
                    raise ValueError("it is neither in UTF-8 nor in UTF-16")
                if line.strip() and not line.startswith(headers):
                    yield read(line.split())

    def picture_like(self, file: Path, split: str = "") -> Path:
        """Return the image nearest to a file whose name is that of the file but for the suffix; see :meth:`picture`."""
        beside = file.with_suffix("")
        return self._nearest(self.by_stem.get(file.stem, []), beside, file.parent, split) or beside

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        found = defaultdict(list)
        for path in self.pictures:
            found[path.name.lower()].append(path)
        return found

    def picture(self, name: str, table: Path, split: str = "") -> Path:
        """Return the file of an image that a table names, or a path that does not exist.

        It is looked for beside the table, in the folder above it and in the root. If it is not there, the files of the
        same name below the root are compared: that one is taken which has most folders in common with the name, then
        with the place of the table, but none of another split.

        Args:
            name: the name or the path in the table, which may be one of another computer, or of Windows.
            table: the file. split: the split of the table.
        """
        folder = table.parent
        given = PureWindowsPath(name)  # Both / and \ separate its parts.
        bases = (folder, folder.parent, self.root)
        for base, sub, written in product(bases, ("", "images"), (name, given.as_posix())):
            path = base / sub / written
            if path.is_file():
                return path
        paths = self._by_name[given.name.lower()]
        return self._nearest(paths, given, folder, split_of(given.parent) or split) or folder / name

    def _nearest(self, paths: Iterable[Path], name: PurePath, folder: Path, split: str) -> Path | None:
        """Return the one of some images that has most folders in common with a name, then with a folder, if it is one.

        If ``split`` is one, none of another split is taken.
        """
        ranked = defaultdict(list)
        for path in paths:
            there = path.parent
            if split and self.file_split(path) not in ("", split):
                continue
            num_near = len(set(folder.parts) & set(there.parts))
            ranked[_common_end(name.parent.parts, there.parts), num_near].append(path)
        best = ranked[max(ranked)] if ranked else []
        return best[0] if len(best) == 1 else None

    def folder(self, name: str, base: str = "") -> Path | None:
        """Return the folder or the list that a table names, which may be a path of another computer or of Windows."""
        written = name.replace("\\", "/")
        # Roboflow's paths begin with .. although the folders are beside the table.
        inside = re.sub(r"^(\.\./)+", "", written)
        parts = PureWindowsPath(name).parts
        ends = ["/".join(parts[start:]) for start in range(1, len(parts) - _LEAST_FOLDERS + 1)]
        for start, end in product((self.root / base, self.root), (name, written, inside, *ends)):
            if (start / end).exists():
                return start / end
        return None

    def table_split(self, table: Path) -> str:
        """Return the split that the name of a table of many images, or else one of its folders, says."""
        return split_of(table.relative_to(self.root).with_suffix(""))

    def file_split(self, file: Path) -> str:
        """Return the split that a folder of a file says. Its own name says nothing."""
        return split_of(file.relative_to(self.root).parent) if file.is_relative_to(self.root) else ""


def files_below(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a pattern in a folder and below it.

    Hidden ones are left out, such as those that macOS and Jupyter put beside the files of a person.
    """
    found = sorted(folder.rglob(pattern))
    return [path for path in found if "/." not in f"/{path.relative_to(folder)}"]


def pictures_below(folder: Path) -> list[Path]:
    """Return the image files in a folder and below it."""
    return list(filter(is_picture, files_below(folder, "*")))


def split_of(path: PurePath) -> str:
    """Return 'train', 'val' or 'test' if a part of a path says it, the last part first, or else an empty text."""
    for part in reversed(path.parts):
        found = _SPLIT.search(part.lower())
        if found:
            return found[1]
    return ""


def _common_end(parts: Sequence[str], others: Sequence[str]) -> int:
    """Return how many of the last parts of two paths are equal."""
    number = 0
    for part, other in zip(reversed(parts), reversed(others), strict=False):
        if part != other:
            break
        number += 1
    return number


def text_of(file: Path, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8, UTF-16 or UTF-32, without the byte order mark that Windows writes.

    Args:
        file: the file. errors: what is done with bytes of other codes; see ``bytes.decode``.

    Raises:
        InvalidInputError: the file is in another code.
    """
    with reading(str(file)):
        content = file.read_bytes()
    try:
        return content.decode(json.detect_encoding(content), errors)
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{file} is neither in UTF-8 nor in UTF-16: {error}") from error


def checked_box(label: str, points: Iterable[float | str], **others: Any) -> Box:
    """Return a box of a class with its points (x1, y1, x2, y2, ...), all of which must be finite; see :class:`Picture`.

    Args:
        label: the class. points: numbers or texts. others: other entries of the annotation.
    """
    if not label:
        raise ValueError("it names no class")
    numbers = list(map(float, points))
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"the box has numbers that are not finite: {listed(numbers)}")
    return label, numbers, others
