"""The files of images and videos that a detector reads, and what it leaves out."""

import glob
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from PIL import Image

from visdet.errors import InvalidInputError, UserError

__all__ = ["find_images", "is_stream", "is_video", "local_path", "one_or_several", "pictures_folder"]

# Files with these names are meant to be images. If one cannot be read, that is an error.
_IMAGE_SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"}
_IMAGE_SUFFIXES |= {".jp2", ".j2k", ".avif", ".ppm", ".pgm", ".pbm"}
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
}
_VIDEO_SUFFIXES |= {".mts", ".m2ts"}
_STREAMS = ("rtsp://", "rtsps://", "rtmp://", "udp://")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_FRAMES = {".gif", ".tif", ".tiff", ".webp", ".png", ".avif"}
# Pillow opens these with other programs or plugins, or they are no pictures.
_NO_IMAGE_FORMATS = {"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG", "FITS"}
_NAMED = 5


def pictures_folder(out_dir: str) -> str:
    """Return the folder below ``--out-dir`` that the pictures go to."""
    return os.path.join(out_dir, "pictures")


def is_stream(path: str) -> bool:
    """Return whether a text is the number of a camera or the address of a stream."""
    return (path.isdecimal() or path.startswith(_STREAMS)) and not os.path.lexists(path)


def is_video(path: str) -> bool:
    """Return whether the suffix of a file is that of a video, or whether a camera or a stream is named."""
    return is_stream(path) or Path(path).suffix.lower() in _VIDEO_SUFFIXES


def local_path(given: str | os.PathLike) -> str:
    """Return the path that is given, also as a ``file://`` address, or as ``~`` for the home folder.

    Raises:
        UserError: the path is empty or no text, or the address is not one of this machine.
    """
    path = os.fspath(given)
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidInputError(f"{path!r} is no path of an image or a video")
    if os.path.lexists(path) or is_stream(path):
        return path
    if not _ADDRESS.match(path):
        return os.path.expanduser(path)
    address = urlsplit(path)
    if address.scheme != "file" or address.netloc not in ("", "localhost"):
        raise InvalidInputError(f"{path} is no file of this machine: download it first")
    return unquote(address.path)


def one_or_several(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> list[str | os.PathLike]:
    """Return the paths as a list, in which one path is an item."""
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)


def find_images(
    paths: str | os.PathLike | Iterable[str | os.PathLike], out_dir: str | os.PathLike | None = None
) -> tuple[list[str], list[str]]:
    """Return the sorted paths of all images and videos, and a remark on each kind of file that is left out.

    A folder is searched with its subfolders, links to folders included. A file in it is a video if its suffix is that
    of one, and an image if its suffix or its content is that of one. Pictures of earlier runs, which are in
    :func:`pictures_folder`, are left out.

    Args:
        paths: one or several files, folders, patterns such as ``images/*.jpg``, and ``file://`` addresses.
        out_dir: the folder that is going to be written, if there is one.

    Raises:
        UserError: a path does not exist, or is neither a file nor a folder, or is to be overwritten; or there is
            nothing to read.
    """
    paths = one_or_several(paths)
    pictures = None if out_dir is None else Path(os.path.realpath(pictures_folder(os.fspath(out_dir))))
    images: dict[str, None] = {}
    left_out: dict[str, list[str]] = {}
    for path in (match for given in paths for match in _matches(local_path(given))):
        real = Path(os.path.realpath(path))
        if real == pictures or pictures in real.parents:
            raise UserError(
                f"{path} is in {pictures}, which is going to be written: choose another --out-dir"
            )
        if os.path.isfile(path) or is_stream(path):
            images[path] = None
        elif os.path.isdir(path):
            files = list(_files_below(path, pictures))
            for file, reason in files:
                left_out.setdefault(reason, []).append(file) if reason else images.setdefault(file)
            if all(reason for _, reason in files):
                raise UserError("\n".join([f"folder {path} has no image and no video", *_remarks(left_out)]))
        else:
            wrong = "is neither a file nor a folder" if os.path.exists(path) else "does not exist"
            raise UserError(f"{path} {wrong}")
    if several := [image for image in sorted(images) if _has_frames(image)]:
        left_out["files of several frames, whose first is read"] = several
    return sorted(images), _remarks(left_out)


def _matches(path: str) -> list[str]:
    """Return the paths that a pattern matches, or the path itself."""
    matches = [] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    return matches or [path]


def _files_below(folder: str, pictures: Path | None) -> Iterator[tuple[str, str]]:
    """Yield every file in and below a folder with the reason for which it is left out, or with an empty text."""
    unreadable: list[OSError] = []
    seen = {os.path.realpath(folder)}
    for place, folders, files in os.walk(folder, onerror=unreadable.append, followlinks=True):
        entered = []
        for name in sorted(folders):
            real = os.path.realpath(os.path.join(place, name))
            if real not in seen and real != str(pictures):  # A link may lead to a folder that contains it.
                entered.append(name)
            elif real == str(pictures):
                yield os.path.join(place, name), "pictures of earlier runs"
            seen.add(real)
        folders[:] = entered
        for name in sorted(files):
            file = os.path.join(place, name)
            yield file, _reason_to_leave_out(file)
    for error in unreadable:
        yield str(error.filename), "folders that cannot be read"


def _reason_to_leave_out(file: str) -> str:
    if not os.path.exists(file):
        return "links that lead nowhere"
    if not os.path.isfile(file):
        return "no files, but devices, pipes or sockets"
    if Path(file).suffix.lower() in _IMAGE_SUFFIXES or is_video(file):
        return ""
    Image.init()
    try:
        with Image.open(file, formats=[name for name in Image.ID if name not in _NO_IMAGE_FORMATS]):
            return ""
    except Image.DecompressionBombError:
        return ""
    except Exception:  # Plugins of Pillow raise errors of many types on the files of other programs.
        return "no images or videos"


def _has_frames(image: str) -> bool:
    """Return whether a file has several frames or pages. JPEGs of phones have a preview as a second one."""
    if Path(image).suffix.lower() not in _FRAMES:
        return False
    try:
        with Image.open(image) as opened:
            return getattr(opened, "n_frames", 1) > 1
    except Exception:  # The detector reports it.
        return False


def _remarks(left_out: dict[str, list[str]]) -> list[str]:
    """Return a line for each reason, with the number of files and the names of some."""
    lines = []
    for reason, files in left_out.items():
        more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
        lines.append(f"left out {len(files)} ({reason}): {', '.join(files[:_NAMED])}{more}")
    return lines
