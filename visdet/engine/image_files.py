"""The image files that a tool reads, and what it leaves out."""

import glob
import mimetypes
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from .errors import UserError

__all__ = ["find_images", "pictures_folder"]

# Files with these names are meant to be images. If one cannot be read, that is an error.
_IMAGE_SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"}
_IMAGE_SUFFIXES |= {".jp2", ".j2k", ".avif", ".ppm", ".pgm", ".pbm"}
_FRAMES = {".gif", ".tif", ".tiff", ".webp", ".png", ".avif"}
# Pillow opens these with other programs or plugins, or they are no pictures.
_NO_IMAGE_FORMATS = {"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG", "FITS"}
_NAMED = 5


def pictures_folder(out_dir: str) -> str:
    """Return the folder below ``--out-dir`` that the pictures go to."""
    return os.path.join(out_dir, "pictures")


def find_images(paths: Sequence[str], out_dir: str | None = None) -> tuple[list[str], list[str]]:
    """Return the sorted paths of all image files, and a remark on each kind of file that is left out.

    A folder is searched with its subfolders, links to folders included. A file in it is an image if its suffix or its
    content is that of one. Pictures of earlier runs, which are in :func:`pictures_folder`, are left out.

    Args:
        paths: image files, folders, and patterns such as ``images/*.jpg``.
        out_dir: the folder that is going to be written, if there is one.

    Raises:
        UserError: a path does not exist, or is neither a file nor a folder, or is to be overwritten; or there is no
            image at all.
    """
    pictures = None if out_dir is None else Path(os.path.realpath(pictures_folder(out_dir)))
    images: dict[str, None] = {}
    left_out: dict[str, list[str]] = {}
    for path in (match for given in paths for match in _matches(given)):
        real = Path(os.path.realpath(path))
        if real == pictures or pictures in real.parents:
            raise UserError(
                f"{path} is in {pictures}, which is going to be written: choose another --out-dir"
            )
        if os.path.isfile(path):
            if (mimetypes.guess_type(path)[0] or "").startswith("video/"):
                raise UserError(
                    f"{path} is a video. visdet.init_detector gives a detector that reads it, or write its frames to a "
                    f"folder first: ffmpeg -i {shlex.quote(path)} FOLDER/%06d.png"
                )
            images[path] = None
        elif os.path.isdir(path):
            files = list(_files_below(path, pictures))
            for file, reason in files:
                left_out.setdefault(reason, []).append(file) if reason else images.setdefault(file)
            if all(reason for _, reason in files):
                raise UserError("\n".join([f"folder {path} has no image", *_remarks(left_out)]))
        else:
            raise UserError(f"{path} is neither an image file nor a folder")
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
    if Path(file).suffix.lower() in _IMAGE_SUFFIXES:
        return ""
    Image.init()
    try:
        with Image.open(file, formats=[name for name in Image.ID if name not in _NO_IMAGE_FORMATS]):
            return ""
    except Image.DecompressionBombError:
        return ""
    except Exception:  # Plugins of Pillow raise errors of many types on the files of other programs.
        return "no images"


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
