"""Transforms that read images and annotations."""

from typing import Literal

import cv2
import numpy as np
import torch
from PIL import Image

from visdet.checks.arguments import Positive, also_takes
from visdet.errors import InvalidInputError, UserError
from visdet.files.images import MAX_PIXELS, opened, sizes_of, to_rgb, turned
from visdet.registry import TRANSFORMS

from .base import BaseTransform, pair
from .tv_results import set_boxes, set_image, side_lengths

__all__ = ["FilterAnnotations", "LoadAnnotations", "LoadImageFromFile"]


@TRANSFORMS.register_module()
class LoadImageFromFile(BaseTransform):
    """Reads ``img_path`` into ``img`` (uint8 [3, H, W]) and sets ``img_shape`` and ``ori_shape``.

    Grey and palette images get three channels, alpha is dropped, and 16-bit images keep their upper byte, with a
    warning if it leaves them nearly black. The first of several pages or frames is read. The orientation that EXIF data
    or TIFF tags give is applied, as in viewers. If only the stored orientation has the height and width of the
    annotation file, the stored orientation is kept, because the boxes were drawn on it. If the results hold ``rgb``
    (uint8 [H, W, 3]), that is taken instead of a file.

    Args:
        to_float32: give float32 values in 0..255.
        color_type: ``'color'``, or ``'color_ignore_orientation'`` to ignore the orientation.
        channel_order: ``'bgr'`` (mmcv's default, which needs ``bgr_to_rgb=True`` in the data preprocessor) or
            ``'rgb'``.
        imdecode_backend: must be ``'pillow'``.
        max_pixels: refuse images of more pixels, which may be made to fill the memory. The default is OpenCV's limit,
            which is above Pillow's. ``None`` accepts any number.
        ignore_empty: return ``None`` for an image that cannot be read, so that the data set takes another one.
        backend_args: mmengine's file backend.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not an image, is damaged, or has another size than in the annotation file. The message
            names the file.

    Source: mmcv's LoadImageFromFile. Difference: Pillow decodes the image, so that pixels may differ from those of
    OpenCV by 1.
    """

    keeps_size = True

    def __init__(
        self,
        to_float32: bool = False,
        color_type: Literal["color", "color_ignore_orientation"] = "color",
        channel_order: Literal["bgr", "rgb"] = "bgr",
        imdecode_backend: Literal["pillow"] = "pillow",
        ignore_empty: bool = False,
        backend_args: dict | None = None,
        max_pixels: Positive | None = MAX_PIXELS,
    ) -> None:
        self.to_float32 = to_float32
        self.color_type = color_type
        self.channel_order = channel_order
        self.max_pixels = max_pixels
        self.ignore_empty = ignore_empty
        self.backend_args = backend_args

    def transform(self, results: dict) -> dict | None:
        try:
            rgb = results.pop("rgb", None)
            if rgb is None:
                rgb = self._read(results["img_path"], (results.get("height"), results.get("width")))
        except UserError:
            if self.ignore_empty:
                return None
            raise
        pixels = cv2.cvtColor(rgb, cv2.COLOR_RGB2BGR) if self.channel_order == "bgr" else rgb
        # This view is in channels-last order, on which resizing is faster. PackDetInputs makes it contiguous.
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        set_image(results, image.float() if self.to_float32 else image)
        results["ori_shape"] = results["img_shape"]
        results["channel_order"] = self.channel_order
        return results

    def _read(self, path: str, expected_shape: tuple) -> np.ndarray:
        """Return RGB values, uint8 [H, W, 3]."""
        with opened("LoadImageFromFile", path, self.backend_args, self.max_pixels) as image:
            rgb = self.rgb_of(image, path, expected_shape)
        height, width = rgb.shape[:2]
        if None not in expected_shape and (height, width) != expected_shape:
            raise InvalidInputError(
                f"LoadImageFromFile: image {path} is {width}x{height} pixels (width x height), "
                f"but its annotation file says {expected_shape[1]}x{expected_shape[0]}: boxes would not fit"
            )
        return rgb

    def rgb_of(self, image: Image.Image, path: str, expected_shape: tuple = (None, None)) -> np.ndarray:
        """Return the RGB values of an image of Pillow, uint8 [H, W, 3], turned as its EXIF data say.

        Args:
            image: the image, whose pixels are not decoded yet if it comes from a file.
            path: its file, or another name of it.
            expected_shape: the (height, width) of the annotation file, if it is known.
        """
        shown_size, stored_size = sizes_of(image)
        is_of_stored = shown_size[::-1] != expected_shape == stored_size[::-1]
        return to_rgb(
            turned(image, self.color_type == "color" and not is_of_stored), "LoadImageFromFile", path
        )


@TRANSFORMS.register_module()
class LoadAnnotations(BaseTransform):
    """Turns ``instances`` into ``gt_bboxes``, ``gt_bboxes_labels``, ``gt_ignore_flags`` and, for tests, ``gt_areas``.

    The boxes are in pixels of the current ``img``. After a ``Resize`` they are scaled by ``scale_factor``. This is not
    possible after what moves pixels otherwise, such as a flip or a crop, so that annotations must be loaded before.
    Records with an ``angle_version`` have turned boxes, and then for tests also ``gt_polygons``, the corners (float64
    [N, 4, 2]) in pixels of the file.

    Args:
        with_bbox, with_label: must be True.
        with_mask: must be ``False``, because visdet has no instance masks.

    Raises:
        ValueError: ``with_mask`` is True, or pixels have been moved.

    Source: mmdet's LoadAnnotations. Difference: mmdet leaves boxes in pixels of the file after a ``Resize``.
    """

    keeps_size = True

    @also_takes(
        with_seg=False,
        with_keypoints=False,
        box_type=...,  # that of the data set
        reduce_zero_label=False,
        poly2mask=...,
        ignore_index=...,
        imdecode_backend=...,
        backend_args=...,
        file_client_args=...,
    )
    def __init__(
        self,
        with_bbox: Literal[True] = True,
        with_label: Literal[True] = True,
        with_mask: Literal[False] = False,
    ) -> None:
        pass

    def transform(self, results: dict) -> dict:
        mover = results.get("moved_by")
        if mover:
            raise InvalidInputError(
                f"LoadAnnotations must come before {mover}, which moves pixels: the boxes of the file are not moved"
            )
        instances = results.get("instances", [])
        # Numpy converts lists in less time than torch.
        corners = np.array([item["bbox"] for item in instances]).reshape(-1, 2)
        scaled = corners.astype(np.float32) * np.array(results.get("scale_factor", (1.0, 1.0)), np.float32)
        turned_shape = (-1, 4, 2)
        is_turned = "angle_version" in results
        set_boxes(results, torch.from_numpy(scaled.reshape(turned_shape if is_turned else (-1, 4))))

        def column(key: str, dtype: type) -> torch.Tensor:
            return torch.from_numpy(np.array([item[key] for item in instances], dtype))

        results["gt_ignore_flags"] = column("ignore_flag", bool)
        if instances and "area" in instances[0]:
            results["gt_areas"] = column("area", float)
            if is_turned:
                results["gt_polygons"] = torch.from_numpy(corners.astype(float).reshape(turned_shape))
        results["gt_bboxes_labels"] = column("bbox_label", np.int64)
        return results


@TRANSFORMS.register_module()
class FilterAnnotations(BaseTransform):
    """Drops boxes that augmentation has made too small.

    Args:
        min_gt_bbox_wh: (width, height) in pixels, or one number for both. A box stays if it is wider and higher than
            this.
        keep_empty: if no box stays, ``True`` returns ``None``, so that another image is taken, and ``False`` returns
            the image without boxes. The name is mmdet's and suggests the opposite. An image that had no box is returned
            as it is.

    Source: mmdet's FilterAnnotations.
    """

    keeps_size = True

    @also_takes(by_box=True, by_mask=False, min_gt_mask_area=...)
    def __init__(
        self, min_gt_bbox_wh: float | tuple[float, float] = (1.0, 1.0), keep_empty: bool = True
    ) -> None:
        self.min_gt_bbox_wh = pair(min_gt_bbox_wh)
        self.keep_empty = keep_empty

    def transform(self, results: dict) -> dict | None:
        boxes = results["gt_bboxes"]
        if not len(boxes):
            return results
        sizes = side_lengths(boxes.as_subclass(torch.Tensor))
        keep = (sizes > sizes.new_tensor(self.min_gt_bbox_wh)).all(dim=1)
        if self.keep_empty and not keep.any():
            return None
        set_boxes(results, boxes, keep)
        return results
