"""The opener of every image file, with limits for what damaged, huge and strange files can do."""

import logging
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import PurePath

import numpy as np
from mmengine import fileio
from mmengine.logging import print_log
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.Image import Transpose

from visdet.errors import InvalidInputError, MissingFileError, UserError, reading

from .writing import is_device

__all__ = [
    "MAX_PIXELS",
    "PICTURE_SUFFIXES",
    "check_no_pipe",
    "extra_frames",
    "is_picture",
    "open_image",
    "opened",
    "orientation_of",
    "sizes_of",
    "to_rgb",
    "turned",
    "upper_bytes",
]

MAX_PIXELS = 2**30  # OpenCV's own limit
PICTURE_SUFFIXES = {
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".png",
    ".bmp",
    ".webp",
    ".tif",
    ".tiff",
    ".gif",
    ".jp2",
    ".j2k",
    ".avif",
    ".ppm",
    ".pgm",
    ".pbm",
}
_PILLOW_LIMIT = threading.Lock()
_BITS_OF_CAMERAS = 12  # Sensors with as many often fill the lower bits of 16.
# The readers, and what each has said of a first file in this process.
_HAVE_SAID: set[tuple[str, str]] = set()
# How a raster is turned to be shown, by its orientation. The turns of 6 and 8 undo each other, all others themselves.
_TURNS = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
_FIRST_OF_CHANGED_SIDES = 5
_TIFF_WIDTH, _TIFF_HEIGHT = 256, 257
_UNDOING = {6: 8, 8: 6}
# What Pillow raises for damaged files of its formats.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    RuntimeError,
    MemoryError,
    EOFError,
    LookupError,
    ArithmeticError,
    struct.error,
    Image.DecompressionBombError,
)


def is_picture(path: PurePath) -> bool:
    """Return whether the suffix of a file is that of an image."""
    return path.suffix.lower() in PICTURE_SUFFIXES


@contextmanager
def open_image(
    path: str | os.PathLike,
    content: bytes | None = None,
    where: str = "",
    max_pixels: int | None = MAX_PIXELS,
) -> Iterator[Image.Image]:
    """Yield an image of Pillow whose pixels are not decoded yet, and name its file in the errors of the block.

    Reading sizes and EXIF data in the block, or decoding the pixels by ``load``, ``convert`` or ``seek``, may find
    damage that opening has not found. Such errors of Pillow's become messages on the file, too. The image is the first
    one of a file that holds several (pages of TIFF, frames of GIF); see :func:`extra_frames`.

    Args:
        path: the file.
        content: the bytes of the file, if they have been read already.
        where: what stands before the message, such as "LoadImageFromFile: ".
        max_pixels: refuse images of more pixels, which may be made to fill the memory. The default is OpenCV's limit,
            which is above Pillow's. ``None`` accepts any number.

    Raises:
        MissingFileError: there is no such file.
        InvalidInputError: the file is a pipe or a folder, is not an image, is damaged or has too many pixels.
    """
    source: str | os.PathLike | BytesIO = path
    size = ""
    if content is None:
        check_no_pipe(path, f"{where}image {path}")
    else:
        source = BytesIO(content)
        size = f" ({len(content)} bytes)"
    try:
        with _opened(source) as image:
            width, height = image.size
            if max_pixels is not None and width * height > max_pixels:
                raise ValueError(
                    f"its {width}x{height} pixels are more than max_pixels={max_pixels}; set LoadImageFromFile's "
                    "max_pixels in the pipeline to read it"
                )
            yield image
    except UserError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(f"{where}image {path} does not exist") from error
    except _DAMAGED as error:
        # Pillow's own message names the buffer that the file was read into.
        unidentified = isinstance(error, UnidentifiedImageError)
        reason = "it is of no format that Pillow knows" if unidentified else str(error) or repr(error)
        raise InvalidInputError(f"{where}cannot read image {path}{size}: {reason}") from error


@contextmanager
def opened(
    reader: str, path: str, backend_args: dict | None, max_pixels: int | None = MAX_PIXELS, of: str = ""
) -> Iterator[Image.Image]:
    """Yield the image of a file, whose pixels are not decoded yet; see :func:`open_image`.

    Args:
        reader: the name of the transform, for messages. path: the file. of: more words on it, for messages.
        backend_args: mmengine's file backend. max_pixels: see :func:`open_image`.
    """
    what = f"{reader}: image {path}{of}"
    with reading(what):
        check_no_pipe(path, what)
        content = fileio.get(path, backend_args=backend_args)
    with open_image(f"{path}{of}", content, f"{reader}: ", max_pixels) as image:
        if number := extra_frames(image):
            said = f"image {path} holds {number + 1} pages or frames, of which the first is read"
            _say_of_first(reader, "frames", said)
        yield image


def to_rgb(image: Image.Image, reader: str, path: str) -> np.ndarray:
    """Return the RGB values of an image of any mode, uint8 [H, W, 3]. The others are as for :func:`opened`."""
    mode = image.mode
    if mode.startswith(("I", "F")):
        values = np.asarray(image)
        if mode == "F" or values.min(initial=0) < 0 or values.max(initial=0) > 65535:
            raise ValueError(f"values of mode {mode} do not fit 16 bits; convert the file to 8 or 16 bits")
        upper_byte = upper_bytes(values.astype(np.uint16), reader, path)
        return np.repeat(upper_byte[..., None], 3, axis=2)
    if mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns without this step. The colours of the palette stay.
    return np.array(image if mode == "RGB" else image.convert("RGB"))


def orientation_of(image: Image.Image) -> int:
    """Return how a viewer turns an image, as EXIF counts it from 1 (not at all) to 8; from 5 on, the sides change.

    The result is 1 if the file has no such number, or damaged EXIF data.
    """
    try:
        found = image.getexif().get(ExifTags.Base.Orientation)
    except _DAMAGED:
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def sizes_of(image: Image.Image) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (width, height) of an image as viewers show it, and as its file stores it.

    Args:
        image: an image whose pixels are not decoded yet, or one that comes from no file.
    """
    stored = image.size
    if image.format == "TIFF":  # Pillow may have turned the size already.
        tags = image.tag_v2  # type: ignore[attr-defined]
        stored = int(tags[_TIFF_WIDTH]), int(tags[_TIFF_HEIGHT])
    return stored[::-1] if orientation_of(image) >= _FIRST_OF_CHANGED_SIDES else stored, stored


def turned(image: Image.Image, is_shown: bool) -> Image.Image:
    """Return an image with its pixels, as viewers show it or as its file stores it. Pillow turns TIFF files itself."""
    orientation = orientation_of(image)
    name = getattr(image, "filename", "")
    # Pillow maps plain TIFF files by their names, with the sides of the turned image, which mixes their rows.
    image.filename = ""  # type: ignore[attr-defined]
    image.load()
    image.filename = name  # type: ignore[attr-defined]
    was_turned = orientation_of(image) != orientation
    if orientation == 1 or was_turned == is_shown:
        return image
    return image.transpose(_TURNS[orientation if is_shown else _UNDOING.get(orientation, orientation)])


def extra_frames(image: Image.Image) -> int:
    """Return how many pages or frames a file has beside the first, which is the one that is read.

    A photograph of a phone that holds a preview or a depth map, too, has none.
    """
    return 0 if image.format == "MPO" else getattr(image, "n_frames", 1) - 1


def upper_bytes(values: np.ndarray, reader: str, path: str) -> np.ndarray:
    """Return the upper bytes of 16-bit values as uint8, and say of the first image that they leave nearly black."""
    highest = values.max(initial=0)
    if 0 < highest < 1 << _BITS_OF_CAMERAS:
        said = (
            f"image {path} is nearly black: its 16-bit values end at {highest}, and only their upper bytes are read. "
            "If they have fewer bits, convert the file to 8 bits"
        )
        _say_of_first(reader, "upper bytes", said)
    return (values >> 8).astype(np.uint8)


def _say_of_first(reader: str, kind: str, message: str) -> None:
    if (reader, kind) not in _HAVE_SAID:
        _HAVE_SAID.add((reader, kind))
        text = f"{reader}: {message}. No other such file is named"
        print_log(text, logger="current", level=logging.WARNING)


def check_no_pipe(path: str | os.PathLike, what: str) -> None:
    """Refuse a pipe, a socket or a device, which a reader could wait for without end.

    Args:
        path: a path, or the address of a file of a remote storage, which is accepted.
        what: how the message calls the file.

    Raises:
        InvalidInputError: the path is one of these.
    """
    if is_device(path):
        raise InvalidInputError(f"{what} is a pipe, a socket or a device, but must be a file")


def _opened(source: str | os.PathLike | BytesIO) -> Image.Image:
    """Return an image, whatever its number of pixels. Pillow has one limit for the whole process."""
    with _PILLOW_LIMIT:
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return Image.open(source)
        finally:
            Image.MAX_IMAGE_PIXELS = limit
