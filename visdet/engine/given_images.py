"""The images that a detector is given: files, folders, videos, arrays, tensors, Pillow's images, and many of them."""

import mimetypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import torch
from PIL import Image

from visdet.errors import InvalidInputError, InvalidTypeError, MissingFileError, UserError, check_choice

from .image_files import find_images

__all__ = ["each_image", "frames_per_second", "is_one_image", "is_video"]

_KINDS = "paths, numpy arrays, tensors, images of Pillow, or lists and iterators of them"


def is_one_image(given: Any) -> bool:
    """Return whether a single image is given, so that a single result is expected."""
    if isinstance(given, np.ndarray | torch.Tensor):
        return given.ndim != 4
    if isinstance(given, str | os.PathLike):
        path = _local_path(given)
        return os.path.isfile(path) and not is_video(path)
    return isinstance(given, Image.Image)


def is_video(given: Any) -> bool:
    """Return whether a video file is given, by the suffix of its name."""
    if not isinstance(given, str | os.PathLike):
        return False
    return (mimetypes.guess_type(_local_path(given))[0] or "").startswith("video/")


def each_image(given: Any, channel_order: str = "bgr") -> Iterator[str | np.ndarray]:
    """Return an iterator of the path of each image file, and of each other image as a new RGB array, uint8 [H, W, 3].

    Args:
        given: a path, a ``file://`` address or a pattern of image files, folders or videos; an array [H, W], [H, W, 1],
            [H, W, 3] or [H, W, 4]; a tensor with the channels first; an image of Pillow; a batch of arrays or tensors;
            or an iterable of them. Values are uint8, uint16 (whose upper byte counts, as in files), other whole
            numbers from 0 to 255, or floats from 0 to 1. Alpha is dropped, and grey values are repeated.
        channel_order: 'bgr' or 'rgb', the order of the channels of arrays and tensors.

    Raises:
        UserError: something given is no image. The message says what it is.
    """
    check_choice("channel_order", channel_order, ("bgr", "rgb"))
    if not isinstance(given, Image.Image | os.PathLike | Iterable) or isinstance(given, dict | bytes | set):
        raise InvalidTypeError(f"images must be {_KINDS}, got {type(given).__name__}")
    return _each_image(given, channel_order)


def _each_image(given: Any, channel_order: str) -> Iterator[str | np.ndarray]:
    if isinstance(given, str | os.PathLike):
        path = _local_path(given)
        yield from _frames(path) if is_video(path) else find_images([path])[0]
    elif isinstance(given, Image.Image):
        yield _rgb_of_picture(given)
    elif isinstance(given, torch.Tensor | np.ndarray):
        for image in given if given.ndim == 4 else [given]:
            yield _rgb_of_array(image, channel_order)
    else:
        for image in given:
            if isinstance(image, list | tuple):
                raise InvalidTypeError(f"images must be {_KINDS}, got a list in a list")
            yield from each_image(image, channel_order)


def _local_path(given: str | os.PathLike) -> str:
    path = os.fspath(given)
    if not isinstance(path, str):
        raise InvalidTypeError(f"images must be {_KINDS}, got {type(path).__name__}")
    address = urlsplit(path) if "://" in path else None
    if address is None:
        return path
    if address.scheme != "file":
        raise InvalidInputError(f"{path} is no file of this machine: download it first")
    return unquote(address.path)


def _rgb_of_picture(picture: Image.Image) -> np.ndarray:
    from visdet.registry import TRANSFORMS

    read = TRANSFORMS.build({"type": "LoadImageFromFile", "channel_order": "rgb"})
    try:
        rgb = read.rgb_of(picture)
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidInputError(f"images: cannot read {picture!r}: {error}") from error
    _check_size(rgb.shape)
    return rgb


def _rgb_of_array(image: Any, channel_order: str) -> np.ndarray:
    """Return the RGB values of an array, or of a tensor with the channels first, as a new array."""
    is_tensor = isinstance(image, torch.Tensor)
    layouts = (
        "[H, W], [1, H, W], [3, H, W] or [4, H, W]"
        if is_tensor
        else "[H, W], [H, W, 1], [H, W, 3] or [H, W, 4]"
    )
    shape = tuple(image.shape)
    if len(shape) == 2:
        image = image[None] if is_tensor else image[..., None]
    elif len(shape) != 3 or shape[0 if is_tensor else 2] not in (1, 3, 4):
        raise InvalidInputError(
            f"images: {'a tensor' if is_tensor else 'an array'} must be {layouts}, got {list(shape)}"
        )
    if is_tensor:
        image = image.detach().movedim(0, -1).cpu()
        image = (image.float() if image.dtype.is_floating_point else image).numpy()
    _check_size(image.shape)
    values = _bytes_of(image)
    colours = values[..., :3] if values.shape[2] > 1 else np.repeat(values, 3, axis=2)
    # The copy is contiguous and belongs to nobody else.
    return np.array(colours[..., ::-1] if channel_order == "bgr" else colours, order="C")


def _bytes_of(image: np.ndarray) -> np.ndarray:
    """Return the values of an image as uint8."""
    kind = image.dtype.kind
    if image.dtype == np.uint8:
        return image
    if kind not in "uif":
        raise InvalidTypeError(f"images: the values must be whole numbers or floats, got {image.dtype}")
    if image.dtype == np.uint16:
        return (image >> 8).astype(np.uint8)
    low, high = image.min(), image.max()
    top = 1 if kind == "f" else 255
    if not (low >= 0 and high <= top):  # This is so for NaN, too.
        hint = (
            "divide them by 255, or give uint8"
            if kind == "f" and np.isfinite(high)
            else "give uint8 or uint16"
        )
        raise InvalidInputError(
            f"images: values of {image.dtype} must be from 0 to {top}, got {low:g} to {high:g}; {hint}"
        )
    return np.round(image * 255).astype(np.uint8) if kind == "f" else image.astype(np.uint8)


def _check_size(shape: tuple[int, ...]) -> None:
    if 0 in shape:
        raise InvalidInputError(f"images: an image has no pixels, its shape is {list(shape)}")


def _opened(path: str) -> Any:
    import cv2

    if not os.path.isfile(path):
        raise MissingFileError(f"video {path} does not exist")
    video = cv2.VideoCapture(path)
    if not video.isOpened():
        raise UserError(f"video {path} cannot be read: OpenCV knows neither its format nor its codec")
    return video


def frames_per_second(path: str | os.PathLike) -> float:
    """Return how many frames a video shows in a second, or 25 if it does not say."""
    import cv2

    video = _opened(_local_path(path))
    try:
        rate = video.get(cv2.CAP_PROP_FPS)
    finally:
        video.release()
    return rate if 0 < rate < 1000 else 25.0


def _frames(path: str) -> Iterator[np.ndarray]:
    """Yield the frames of a video as RGB arrays, one at a time."""
    import cv2

    video, number = _opened(path), 0
    try:
        while True:
            is_read, frame = video.read()
            if not is_read:
                break
            number += 1
            yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
    finally:
        video.release()
    if not number:
        raise UserError(f"video {Path(path)} has no frame that OpenCV can read")
