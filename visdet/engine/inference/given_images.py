"""The images that a detector is given: files, folders, videos, arrays, tensors, Pillow's images, and many of them."""

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from visdet.errors import InvalidInputError, InvalidTypeError, MissingFileError, UserError
from visdet.files.images import open_image, upper_bytes

from ..process.console import say
from .image_files import AnyPath, find_images, is_stream, is_video, local_path, matches_of

__all__ = ["GivenImage", "as_array", "each_image", "frames_per_second", "is_one_image", "video_of"]

_KINDS = "paths, numpy arrays, tensors, images of Pillow, bytes or open files, or lists and iterators of them"
_Content = bytes | bytearray | io.IOBase  # of a file
Array = np.ndarray | torch.Tensor


class GivenImage(NamedTuple):
    """An image: its file, or its pixels, RGB uint8 [H, W, 3]. A frame of a video has all values.

    Attributes:
        path: the file of the image or of its video, or None.
        pixels: the pixels, or None to read the file.
        frame: the number of the frame in its video from 0 on, or None.
        time: when the frame is shown, in seconds since the start of its video, or None.
    """

    path: str | None = None
    pixels: np.ndarray | None = None
    frame: int | None = None
    time: float | None = None


def is_one_image(given: Any) -> bool:
    """Return whether a single image is given, so that a single result is expected."""
    if isinstance(given, Array):
        return given.ndim != 4
    if isinstance(given, AnyPath):
        path = local_path(given)
        return os.path.isfile(path) and not is_video(path)
    return isinstance(given, Image.Image | _Content)


def video_of(given: Any) -> str | None:
    """Return the path of a video file that is given, or None if something else is."""
    path = local_path(given) if isinstance(given, AnyPath) else ""
    is_one = is_video(path) and not os.path.isdir(path) and matches_of(path) == [path]
    return path if is_one else None


def each_image(given: Any, channel_order: str = "bgr", name: str = "images") -> Iterator[GivenImage]:
    """Return an iterator of what is given.

    Args:
        given: a path or a pattern of image files, videos or folders of both; an array [H, W],
            [H, W, 1], [H, W, 3] or [H, W, 4]; a tensor with the channels first; an image of Pillow; a batch of arrays
            or tensors; or an iterable of them. Values are uint8, uint16 (whose upper byte counts, as in files), other
            whole numbers from 0 to 255, or floats from 0 to 1. Alpha is dropped, and grey values are repeated.
        channel_order: 'bgr' or 'rgb', the order of the channels of arrays and tensors.
        name: how messages call what is given.

    Raises:
        UserError: something given is no image. The message says what it is.
    """
    given = as_array(given)
    is_known = isinstance(given, Image.Image | os.PathLike | Iterable)
    if not is_known or isinstance(given, Mapping | set | frozenset):
        raise InvalidTypeError(f"{name} must be {_KINDS}, got {type(given).__name__}")
    return _each_image(given, channel_order, name)


def as_array(given: Any) -> Any:
    """Return an array of another package, such as jax, as one of numpy, and anything else as it is.

    Its rows would be taken for images otherwise.
    """
    is_of_others = not isinstance(given, Array) and getattr(given, "ndim", 0) > 1
    return np.asarray(given) if is_of_others else given


def _each_image(given: Any, channel_order: str, name: str) -> Iterator[GivenImage]:
    match given:
        case str() | os.PathLike():
            paths, _ = find_images(given)
            for path in paths:
                if is_video(path):
                    yield from _frames(path)
                else:
                    yield GivenImage(path)
        case Image.Image():
            yield GivenImage(pixels=_rgb_of_picture(given, name))
        case bytes() | bytearray() | io.IOBase():
            yield GivenImage(pixels=_rgb_of_content(given, name))
        case torch.Tensor() | np.ndarray() if given.ndim != 4:
            yield GivenImage(pixels=_rgb_of_array(given, channel_order, name))
        case _:
            for index, image in enumerate(given):
                if isinstance(image, list | tuple):
                    raise InvalidTypeError(
                        f"{name}[{index}] must be a path, an array, a tensor or an image of Pillow, got a "
                        f"{type(image).__name__}"
                    )
                yield from each_image(image, channel_order, f"{name}[{index}]")


def _rgb_of_picture(picture: Image.Image, name: str) -> np.ndarray:
    from visdet.registry import TRANSFORMS

    read = TRANSFORMS.build({"type": "LoadImageFromFile", "channel_order": "rgb"})
    try:
        rgb = read.rgb_of(picture, name)
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidInputError(f"{name}: cannot read {picture!r}: {error}") from error
    if 0 in rgb.shape:
        raise InvalidInputError(f"{name}: an image has no pixels, its size is {picture.size}")
    return rgb


def _rgb_of_content(given: Any, name: str) -> np.ndarray:
    """Return the RGB values of the bytes of an image file, or of a file that is open."""
    content = given.read() if isinstance(given, io.IOBase) else bytes(given)
    if not isinstance(content, bytes):
        raise InvalidTypeError(f"{name}: a file must be opened for bytes, by open(path, 'rb')")
    try:
        with open_image(name, content) as picture:
            return _rgb_of_picture(picture, name)
    except UserError as error:
        raise InvalidInputError(
            f"{name} must be the content of an image, got {type(given).__name__}: {error}"
        ) from error


def _rgb_of_array(image: Any, channel_order: str, name: str) -> np.ndarray:
    """Return the RGB values of an array, or of a tensor with the channels first, as a new array."""
    shape = list(image.shape)
    rule = "an array must be [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]"
    if isinstance(image, torch.Tensor):
        rule = "a tensor must be [H, W], [1, H, W], [3, H, W] or [4, H, W]"
        image = (image.float() if image.is_floating_point() else image).numpy(force=True)
        image = np.moveaxis(image, 0, -1) if image.ndim == 3 else image
    image = np.asarray(image)  # A matrix would stay two-dimensional.
    image = image[..., None] if image.ndim == 2 else image
    *sides, channels = image.shape
    if len(sides) != 2 or channels not in (1, 3, 4):
        raise InvalidInputError(f"{name}: {rule}, got {shape}")
    if 0 in sides:
        raise InvalidInputError(f"{name}: an image has no pixels, its shape is {shape}")
    values = _bytes_of(image, name)
    colours = values[..., :3] if channels > 1 else np.repeat(values, 3, axis=2)
    # The copy is contiguous and belongs to nobody else.
    return np.array(colours[..., ::-1] if channel_order == "bgr" else colours, order="C")


def _bytes_of(image: np.ndarray, name: str) -> np.ndarray:
    """Return the values of an image as uint8."""
    dtype = image.dtype
    kind = dtype.kind
    if dtype == np.uint8:
        return image
    if kind not in "uif":
        raise InvalidTypeError(f"{name}: the values must be whole numbers or floats, got {dtype}")
    if kind == "u" and dtype.itemsize == 2:  # in either order of the bytes
        return upper_bytes(image, "infer", name)
    low = image.min()
    high = image.max()
    is_float = kind == "f"
    # Resizing and conversions leave rounding errors.
    top, slack = (1, 0.001) if is_float else (255, 0)
    if not -slack <= low <= high <= top + slack:  # This is so for NaN, too.
        raise InvalidInputError(
            f"{name}: values of {dtype} must be from 0 to {top}, got {low:g} to {high:g}; give uint8 or uint16, "
            "or divide floats by 255"
        )
    whole = np.round(image * 255) if is_float else image  # Rounding takes integers several times as long.
    return whole.astype(np.uint8)


def _opened(path: str) -> Any:
    import cv2

    streams = is_stream(path)
    if not (streams or os.path.isfile(path)):
        raise MissingFileError(f"video {path} does not exist")
    video = cv2.VideoCapture(int(path) if path.isdecimal() else path)
    if video.isOpened():
        return video
    if streams:
        raise UserError(f"camera or stream {path} cannot be opened")
    raise UserError(f"video {path} cannot be read: OpenCV knows neither its format nor its codec")


def frames_per_second(path: str) -> float:
    """Return how many frames a video shows in a second on average, or 25 if it does not say."""
    return _rate_of(_opened(path))


def _rate_of(video: Any) -> float:
    import cv2

    rate = video.get(cv2.CAP_PROP_FPS)
    return rate if 0 < rate < 1000 else 25.0


def _frames(path: str) -> Iterator[GivenImage]:
    """Yield the frames of a video as RGB arrays with their numbers and times, one at a time.

    At the end it says if the video lacks some of its frames.
    """
    import cv2

    video = _opened(path)
    fact = video.get
    milliseconds = cv2.CAP_PROP_POS_MSEC
    is_read, frame = video.read()
    if not is_read:
        raise UserError(f"video {path} has no frame that OpenCV can read")
    number = 0
    time = max(fact(milliseconds) / 1000, 0.0)
    longest = 0.0
    rate = _rate_of(video)
    first = fact(getattr(cv2, "CAP_PROP_PTS", -1))  # 0 in versions of OpenCV that do not know it
    while is_read:
        yield GivenImage(path, cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), number, time)
        is_read, frame = video.read()
        number += 1
        shown = fact(milliseconds) / 1000
        # A stream may give no times, and a damaged file the same one again.
        after = shown if shown > time else time + 1 / rate
        longest = max(longest, after - time)
        time = after
    says_number = not is_stream(path) and rate == fact(cv2.CAP_PROP_FPS)
    announced = int(fact(cv2.CAP_PROP_FRAME_COUNT)) if says_number else 0
    # Some formats give the duration alone, with the time before the first frame. OpenCV estimates the number by it.
    missing = min(announced - number, announced - first - (time + longest) * rate)
    if missing > max(1, announced // 100):
        say(f"video {path} is damaged or cut short: only {number} of its {announced} frames can be read")
