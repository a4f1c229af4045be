"""Transforms of the images of several cameras, and of the depth maps that lidar points give."""

import logging
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import cv2
import numpy as np
from mmengine import fileio
from mmengine.logging import print_log
from PIL import Image

from visdet.checks.arguments import Above0, Positive, Range
from visdet.errors import InvalidInputError, reading
from visdet.files.images import opened, orientation_of, sizes_of, to_rgb, turned
from visdet.registry import TRANSFORMS

from ..augmentation import resized_sides
from .base import BaseTransform

# What libjpeg can divide the sides of an image by while it decodes, the largest first.
_REDUCTIONS = (8, 4, 2)


@TRANSFORMS.register_module()
class LoadMultiViewImageFromFiles(BaseTransform):
    """Reads ``img_filename`` into ``img``, a list of BGR uint8 [H, W, 3], and sets ``img_shape``, a list of (H, W).

    Args:
        to_float32: accepted for published configs, without effect. Images stay uint8 until they are on the device.
        color_type: ``'unchanged'`` or ``'color_ignore_orientation'`` read the image as it is stored, which camera
            matrices are for. ``'color'`` turns it as its EXIF or TIFF orientation says. Images have three channels in
            all cases.
        backend_args: mmengine's file backend.
        reduces: whether a JPEG image that ``aug_config`` shrinks is decoded at a half, a quarter or an eighth of its
            size, as long as that is not below the size that ``ResizeCropFlipImage`` asks for. That transform must come
            next. ``ori_shape`` is the full size.

    Raises:
        FileNotFoundError: the file of a camera is missing.
        ValueError: a file is not an image, is damaged, or has more than 2 ** 30 pixels.

    Source: the name is mmdet3d's. Difference: images are uint8, and a list instead of a stacked array.
    """

    def __init__(
        self,
        to_float32: bool = False,
        color_type: Literal["color", "unchanged", "color_ignore_orientation"] = "unchanged",
        backend_args: dict | None = None,
        reduces: bool = False,
    ) -> None:
        self.turns = color_type == "color"
        self.backend_args = backend_args
        self.reduces = reduces

    def transform(self, results: dict) -> dict:
        paths = results["img_filename"]
        given = results.get
        names = given("cam_names", range(len(paths)))
        resize = (given("aug_config") or {}).get("resize", 1) if self.reduces else 1
        read = [
            self._read(path, name, given("token"), resize) for name, path in zip(names, paths, strict=True)
        ]
        images, sizes = map(list, zip(*read, strict=True))
        results |= {"img": images, "filename": paths, "ori_shape": sizes}
        results["img_shape"] = [image.shape[:2] for image in images]
        if self.reduces:
            results["full_sizes"] = sizes
        return results

    def _read(
        self, path: str, camera: str, token: str | None, resize: float
    ) -> tuple[np.ndarray, tuple[int, int]]:
        """Return the image of a file and the (height, width) that it has without being reduced."""
        turns = self.turns
        of = f" of camera {camera} in frame {token}"
        with opened("LoadMultiViewImageFromFiles", path, self.backend_args, of=of) as picture:
            shown, stored = sizes_of(picture)
            width, height = shown if turns else stored
            divisor = _reduction(resize)
            if divisor > 1 and not (turns and orientation_of(picture) != 1):
                # It has no effect on other formats.
                picture.draft("RGB", (width // divisor, height // divisor))
            rgb = to_rgb(turned(picture, turns), "LoadMultiViewImageFromFiles", path)
        return cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR), (height, width)


@TRANSFORMS.register_module()
class LoadPointsFromFile(BaseTransform):
    """Reads the float32 rows of ``pts_filename`` into ``points`` [n, len(use_dim)].

    Args:
        coord_type: ``'LIDAR'``, ``'DEPTH'`` or ``'CAMERA'``. It has no effect.
        load_dim: numbers per point in the file.
        use_dim: the columns to keep, or the number of columns to keep from the first one on.
        file_client_args: mmcv 1's name of ``backend_args``. Only ``dict(backend='disk')`` is accepted.
        backend_args: mmengine's file backend.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: an argument is not valid, the frame has no ``lidar_path``, or the size of the file is not a multiple
            of ``load_dim`` numbers.

    Source: the name and keywords are mmdet3d's, without its shift_height and use_color.
    """

    def __init__(
        self,
        coord_type: Literal["CAMERA", "LIDAR", "DEPTH"],
        load_dim: int = 6,
        use_dim: int | Sequence[int] = (0, 1, 2),
        file_client_args: dict | None = None,
        backend_args: dict | None = None,
    ) -> None:
        self.load_dim = load_dim
        columns = list(range(use_dim) if isinstance(use_dim, int) else use_dim)
        if not columns or min(columns) < 0 or max(columns) >= load_dim:
            raise InvalidInputError(
                f"LoadPointsFromFile: use_dim must be below load_dim {load_dim}, got {columns}"
            )
        self.use_dim = columns
        if file_client_args not in (None, {"backend": "disk"}):
            raise InvalidInputError(
                f"LoadPointsFromFile: use backend_args, got file_client_args={file_client_args}"
            )
        self.backend_args = backend_args

    def transform(self, results: dict) -> dict:
        load_dim = self.load_dim
        path = results["pts_filename"]
        if path is None:
            raise InvalidInputError(
                f"LoadPointsFromFile: frame {results.get('token')} has no lidar_path. Without lidar, leave "
                "LoadPointsFromFile and MultiScaleDepthMapGenerator out of the pipeline, and set depth_branch=None in "
                "the model"
            )
        with reading(f"LoadPointsFromFile: {path}"):
            content = fileio.get(path, backend_args=self.backend_args)
        if len(content) % (4 * load_dim):
            raise InvalidInputError(
                f"LoadPointsFromFile: {path} must hold rows of {load_dim} float32, got {len(content)} bytes"
            )
        results["points"] = np.frombuffer(content, np.float32).reshape(-1, load_dim)[:, self.use_dim]
        return results


@TRANSFORMS.register_module()
class MultiScaleDepthMapGenerator(BaseTransform):
    """Makes the depth maps ``gt_depth`` of ``points``, float32 [V, H / s, W / s] for each stride s of ``downsample``.

    ``lidar2img`` projects the points into images of ``img_shape``. A cell holds the depth in metres of the nearest
    point in it, clipped to 0.1..max_depth, or -1 if there is none. The first cell of stride s reaches from 0 to s,
    because the centre of the first pixel is (0.5, 0.5).

    Args:
        downsample: one stride or several.
        max_depth: the greatest depth in metres.

    Source: the name and the rule are Sparse4D's. Difference: Sparse4D rounds pixels, as if the centre of the first one
    were 0.
    """

    def __init__(
        self,
        downsample: Positive | Sequence[Positive] = 1,
        max_depth: Annotated[float, Range(0.1, is_open=True)] = 60,
    ) -> None:
        self.downsample = [downsample] if isinstance(downsample, int) else list(downsample)
        self.max_depth = max_depth

    def transform(self, results: dict) -> dict:
        points = np.ascontiguousarray(results["points"][:, :3].T)
        maps: list[list[np.ndarray]] = [[] for _ in self.downsample]
        for projection, (height, width) in zip(results["lidar2img"], results["img_shape"], strict=True):
            matrix = projection[:3].astype(np.float32)
            seen = matrix[:, :3] @ points + matrix[:, 3:]
            seen = seen[:, seen[2] >= 0.1]
            depth = seen[2]
            pixels = np.floor(seen[:2] / depth)
            inside = np.flatnonzero(((pixels >= 0) & (pixels < [[width], [height]])).all(axis=0))
            inside = inside[np.argsort(-depth[inside], kind="stable")]  # The nearest is drawn last.
            u, v = pixels[:, inside].astype(np.int64)
            depth = np.minimum(depth[inside], self.max_depth)
            for level, stride in zip(maps, self.downsample, strict=True):
                # A backbone rounds up, and so does this.
                level.append(np.full((math.ceil(height / stride), math.ceil(width / stride)), -1, np.float32))
                level[-1][v // stride, u // stride] = depth
        results["gt_depth"] = [np.stack(level) for level in maps]
        return results


@TRANSFORMS.register_module()
class ResizeCropFlipImage(BaseTransform):
    """Resizes, crops, flips and rotates all images by ``aug_config``, and changes the camera matrices to match.

    If an image is flipped, its projection is flipped, too, so that boxes stay as they are. Pixels outside the original
    image are black. Without an ``aug_config``, nothing changes. In the matrices before and after, the centre of the
    first pixel is (0.5, 0.5).

    Source: the name and the geometry are Sparse4D's. Difference: all is one step of bilinear interpolation. An image
    that shrinks to a half or less is first divided by 2, 4 or 8.
    """

    _has_warned = False

    def transform(self, results: dict) -> dict:
        config = results.get("aug_config")
        if config is None:
            return results
        images = results["img"]
        projections = results["lidar2img"]
        sizes = results.pop("full_sizes", None) or [image.shape[:2] for image in images]
        for index, (image, size) in enumerate(zip(images, sizes, strict=True)):
            self._compare_size(size, config, results)
            images[index], matrix = _warp(image, config, size)
            projections[index] = matrix @ projections[index]
            if "cam_intrinsic" in results:
                results["cam_intrinsic"][index][:2] *= config.get("resize", 1)
        results["img_shape"] = [image.shape[:2] for image in images]
        return results

    def _compare_size(self, size: tuple[int, int], config: dict, results: dict) -> None:
        """Warn once if an image does not have the size that the crop was computed for."""
        factor = config.get("resize", 1)
        expected: Any = config.get("resize_dims")
        height, width = size
        fits = expected is None or resized_sides(width, height, factor) == tuple(expected)
        if fits or self._has_warned:
            return
        self._has_warned = True
        W, H = (round(side / factor) for side in expected)
        print_log(
            f"ResizeCropFlipImage: frame {results.get('token')} has an image of {width} x {height} pixels, but "
            f"data_aug_conf of the data set says W = {W}, H = {H}. The crop may lie outside the image, where it is "
            "black",
            logger="current",
            level=logging.WARNING,
        )


def _warp(image: np.ndarray, config: dict, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the image [h, w, 3] that ``config`` asks for and the matrix [4, 4] from old to new pixels.

    Args:
        image: the image, which may have been reduced while it was decoded. config: the ``aug_config``.
        size: the (height, width) of the image without being reduced, which the matrix is for.
    """
    given = config.get
    height, width = size
    resize = given("resize", 1)
    left, top, right, bottom = given("crop", (0, 0, *resized_sides(width, height, resize)))
    new_width, new_height = right - left, bottom - top
    matrix = np.diag([resize, resize, 1.0, 1.0])
    matrix[:2, 2] -= (left, top)
    if given("flip", False):
        matrix[0] *= -1
        matrix[0, 2] += new_width
    rotation = np.eye(4)
    center = (new_width / 2, new_height / 2)
    rotation[:2, :3] = cv2.getRotationMatrix2D(center, given("rotate", 0), 1.0)
    matrix = rotation @ matrix
    divisor = _reduction(resize)
    if image.shape[:2] == size and divisor > 1:
        image = np.asarray(Image.fromarray(image).reduce(divisor))
    # One step, which shrinks the image by a factor of 2 at most. The centre of OpenCV's first pixel is 0.
    divisor = round(width / image.shape[1])
    centres = np.array([[divisor, 0, divisor / 2], [0, divisor, divisor / 2], [0, 0, 1]])
    whole = matrix[:2, :3] @ centres
    whole[:, 2] -= 0.5
    return cv2.warpAffine(image, whole, (new_width, new_height), flags=cv2.INTER_LINEAR), matrix


def _reduction(resize: float) -> int:
    """Return by how much an image may be divided before it is resized by a factor, 1 for not at all."""
    return next((divisor for divisor in _REDUCTIONS if resize * divisor <= 1), 1)


@TRANSFORMS.register_module()
class NormalizeMultiviewImage(BaseTransform):
    """Normalises images to float32 by ``(image - mean) / std``, after converting them from BGR to RGB if ``to_rgb``.

    Published pipelines use this transform. If DrivingDataPreprocessor normalises the images instead, only a quarter of
    the bytes are copied to the device.

    Args:
        mean, std: the mean and the standard deviation of each channel.
        to_rgb: whether the channels are reversed first.
    """

    def __init__(
        self, mean: tuple[float, float, float], std: tuple[Above0, Above0, Above0], to_rgb: bool = True
    ) -> None:
        self.mean = np.array(mean, dtype=np.float32)
        self.std = np.array(std, dtype=np.float32)
        self.to_rgb = to_rgb

    def transform(self, results: dict) -> dict:
        step = -1 if self.to_rgb else 1
        results["img"] = [
            (image[..., ::step].astype(np.float32) - self.mean) / self.std for image in results["img"]
        ]
        return results
