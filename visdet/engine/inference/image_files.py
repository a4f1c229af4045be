"""The files of images and videos that a detector reads, and what it leaves out."""

import glob
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from os.path import realpath
from pathlib import Path

from visdet.errors import InvalidInputError, UserError, listed
from visdet.files.images import PICTURE_SUFFIXES

__all__ = [
    "AnyPath",
    "find_images",
    "is_stream",
    "is_video",
    "local_path",
    "matches_of",
    "one_or_several",
    "pictures_folder",
]

AnyPath = str | os.PathLike
_VIDEO_SUFFIXES = {
    ".mp4",
    ".m4v",
    ".mov",
    ".avi",
    ".mkv",
    ".webm",
    ".mpg",
    ".mpeg",
    ".wmv",
    ".flv",
    ".ogv",
    ".3gp",
    ".mts",
    ".m2ts",
}
_SUFFIXES = _VIDEO_SUFFIXES | PICTURE_SUFFIXES
_STREAMS = ("rtsp://", "rtsps://", "rtmp://", "udp://")


def pictures_folder(out_dir: AnyPath) -> Path:
    """Return the folder below ``--out-dir`` that the pictures go to."""
    return Path(out_dir, "pictures")


def is_stream(path: str) -> bool:
    """Return whether a text is the number of a camera or the address of a stream."""
    return (path.isdecimal() or path.startswith(_STREAMS)) and not os.path.lexists(path)


def is_video(path: str) -> bool:
    """Return whether the suffix of a file is that of a video, or whether a camera or a stream is named."""
    return is_stream(path) or Path(path).suffix.lower() in _VIDEO_SUFFIXES


def local_path(given: AnyPath) -> str:
    """Return the path that is given, in which ``~`` may stand for the home folder.

    Raises:
        UserError: the path is empty or no text.
    """
    path = os.fspath(given)
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidInputError(f"{path!r} is no path of an image or a video")
    if path.startswith(("http://", "https://")):
        raise InvalidInputError(
            f"{path} does not exist as a file, and nothing is fetched from an address: give a file, or its bytes"
        )
    return os.path.expanduser(path)


def one_or_several(paths: AnyPath | Iterable[AnyPath]) -> list[AnyPath]:
    """Return the paths as a list, in which one path is an item."""
    return [paths] if isinstance(paths, AnyPath) else list(paths)


def find_images(
    paths: AnyPath | Iterable[AnyPath], out_dir: AnyPath | None = None
) -> tuple[list[str], list[str]]:
    """Return the sorted paths of all images and videos, and a remark on each kind of file that is left out.

    A folder is searched with its subfolders, links to folders included. A file in it is an image or a video if its
    suffix is that of one. Pictures of earlier runs, which are in :func:`pictures_folder`, are left out.

    Args:
        paths: one or several files, folders and patterns such as ``images/*.jpg``.
        out_dir: the folder that is going to be written, if there is one.

    Raises:
        UserError: a path does not exist, or is neither a file nor a folder, or is to be overwritten; or there is
            nothing to read.
    """
    pictures = None if out_dir is None else Path(realpath(pictures_folder(out_dir)))
    images: dict[str, None] = {}
    others: list[str] = []
    for path in chain.from_iterable(matches_of(local_path(given)) for given in one_or_several(paths)):
        place = Path(path)
        if pictures and Path(realpath(path)).is_relative_to(pictures):
            raise UserError(
                f"{path} is in {pictures}, which is going to be written: choose another --out-dir"
            )
        if place.is_file() or is_stream(path):
            images[path] = None
        elif place.is_dir():
            files = list(_files_below(path, pictures))
            found = [
                file for file in files if Path(file).suffix.lower() in _SUFFIXES and os.path.isfile(file)
            ]
            images |= dict.fromkeys(found)
            others += [file for file in files if file not in images]
            if not found:
                raise UserError("\n".join([f"folder {path} has no image and no video", *_remark(others)]))
        else:
            wrong = "is neither a file nor a folder" if place.exists() else "does not exist"
            raise UserError(f"{path} {wrong}")
    return sorted(images), _remark(others)


def matches_of(path: str) -> list[str]:
    """Return the paths that a pattern matches, or the path itself."""
    matches = [] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    return matches or [path]


def _files_below(folder: str, pictures: Path | None) -> Iterator[str]:
    """Yield every file in and below a folder, each folder once, but not the pictures of earlier runs."""

    def refuse(error: OSError) -> None:
        raise error

    seen = {str(pictures)}
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = realpath(place)
        if real in seen:  # A link may lead to a folder that contains it.
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (os.path.join(place, name) for name in sorted(files))


def _remark(files: list[str]) -> list[str]:
    """Return a line with the number of files that are left out and the names of some, or nothing without a file."""
    return [f"left out {len(files)} (no images or videos): {listed(files, 5)}"] if files else []
