"""Transforms that move the pixels of an image together with its boxes."""

from collections.abc import Sequence
from random import Random
from typing import Annotated, Any, Literal

from torchvision.transforms.v2 import functional as F

from visdet.checks.arguments import Above0, Ascending, Positive, Range, Share, also_takes, checked_value
from visdet.errors import InvalidInputError
from visdet.registry import TRANSFORMS
from visdet.structures.planned_batch import sample_draws

from .base import BaseTransform, DrawnTransform, pair
from .tv_results import are_in, clipped, moved, set_boxes, set_image

_Direction = Literal["horizontal", "vertical", "diagonal"]
_Part = Annotated[float, Range(0, 1, is_open=True)]
_Sides = tuple[Positive, Positive]
_Parts = tuple[_Part, _Part]
# What the size of a crop must be, if it is not the sides of one.
_CROP_SIZES = {
    "absolute_range": Annotated[_Sides, Ascending()],
    "relative": _Parts,
    "relative_range": _Parts,
}


@TRANSFORMS.register_module()
class Resize(BaseTransform):
    """Scales the image and its boxes, and multiplies ``scale_factor`` (width, height) by the ratio of the sizes.

    With ``keep_ratio`` and ``scale=(a, b)``, the image becomes as large as fits. With
    ``factor = min(max(a, b) / max(w, h), min(a, b) / min(w, h))``, the new size is ``int(w * factor + 0.5)``,
    ``int(h * factor + 0.5)``. Without ``keep_ratio``, the new (width, height) is (a, b).

    Args:
        scale: (width, height), or one number for both. With ``keep_ratio``, one of the two may be infinite.
        scale_factor: one number, or one for the width and one for the height, instead of ``scale``. The target width is
            ``int(w * factor + 0.5)``, and likewise the height.
        keep_ratio: keep the proportions of the image.
        clip_object_border: clip the boxes to the image.
        backend: ``'cv2'`` uses no anti-aliasing filter, as in OpenCV. ``'pillow'`` uses one, as in Pillow. torchvision
            does the computation in both cases.
        interpolation: must be ``'bilinear'``.

    Raises:
        ValueError: an argument is not valid, or not exactly one of ``scale`` and ``scale_factor`` is given.

    Source: mmcv's and mmdet's Resize. Difference: ``scale_factor`` is the product over all resizes of a pipeline.
    """

    def __init__(
        self,
        scale: Above0 | tuple[Above0, Above0] | None = None,
        scale_factor: Above0 | tuple[Above0, Above0] | None = None,
        keep_ratio: bool = False,
        clip_object_border: bool = True,
        backend: Literal["cv2", "pillow"] = "cv2",
        interpolation: Literal["bilinear"] = "bilinear",
    ) -> None:
        if (scale is None) == (scale_factor is None):
            raise InvalidInputError(
                f"Resize: give either scale or scale_factor, got {scale=} and {scale_factor=}"
            )
        self.scale: Any = pair(scale)
        self.scale_factor = pair(scale_factor)
        self.keep_ratio = keep_ratio
        self.clip_object_border = clip_object_border
        self.backend = backend

    def new_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the new (height, width) of an image of ``height`` x ``width``."""
        if self.scale_factor is None:
            target_w, target_h = self.scale
        else:
            target_w, target_h = (
                int(n * f + 0.5) for n, f in zip((width, height), self.scale_factor, strict=True)
            )
        if self.keep_ratio:
            factor = min(
                max(target_w, target_h) / max(width, height),
                min(target_w, target_h) / min(width, height),
            )
            target_w, target_h = int(width * factor + 0.5), int(height * factor + 0.5)
        return max(int(target_h), 1), max(int(target_w), 1)

    def planned_size(self, size: tuple[int, int], rng: Random) -> tuple[int, int]:
        return self.new_size(*size)

    def transform(self, results: dict) -> dict:
        height, width = results["img_shape"]
        new_height, new_width = self.new_size(height, width)
        size = [new_height, new_width]
        set_image(results, F.resize(results["img"], size, antialias=self.backend == "pillow"))
        factor_w, factor_h = results.get("scale_factor", (1.0, 1.0))
        results["scale_factor"] = (factor_w * new_width / width, factor_h * new_height / height)
        results["keep_ratio"] = self.keep_ratio
        if "gt_bboxes" in results:
            boxes = F.resize(results["gt_bboxes"], size)
            set_boxes(results, clipped(boxes) if self.clip_object_border else boxes)
        return results


@TRANSFORMS.register_module()
class RandomChoiceResize(DrawnTransform):
    """Resizes to one of ``scales``, all of which are equally likely.

    Args:
        scales: a list of (width, height) or of numbers, a tuple of (width, height), or a single one.
        **resize_kwargs: other keywords of Resize, such as ``keep_ratio``.

    Source: mmcv's RandomChoiceResize.
    """

    @also_takes(resize_type="Resize")
    def __init__(self, scales: Sequence | int, **resize_kwargs: Any) -> None:
        are_several = isinstance(scales, list) or (
            isinstance(scales, tuple) and all(isinstance(scale, (list, tuple)) for scale in scales)
        )
        given: Any = scales
        self.scales = list(given) if are_several else [given]
        self._resizes = [Resize(scale, **resize_kwargs) for scale in self.scales]

    def _drawn(self, rng: Random) -> BaseTransform:
        return self._resizes[rng.randint(0, len(self._resizes) - 1)]


@TRANSFORMS.register_module()
class RandomResize(DrawnTransform):
    """Resizes to a scale drawn from a range.

    Args:
        scale: two (width, height) pairs, between which the width and the height are drawn as integers, or one pair that
            is multiplied by a ratio.
        ratio_range: the lowest and the highest ratio. One ratio is drawn for width and height.
        **resize_kwargs: other keywords of Resize, such as ``keep_ratio``.

    Source: mmcv's RandomResize.
    """

    @also_takes(resize_type="Resize")
    def __init__(
        self,
        scale: tuple[Above0, Above0] | tuple[tuple[Above0, Above0], tuple[Above0, Above0]],
        ratio_range: tuple[Above0, Above0] | None = None,
        **resize_kwargs: Any,
    ) -> None:
        given: Any = scale
        is_one_pair = isinstance(given[0], (int, float))
        if is_one_pair != (ratio_range is not None):
            raise InvalidInputError(
                "RandomResize: scale must be one (width, height) with a ratio_range, or two of them without, "
                f"got {scale=} and {ratio_range=}"
            )
        self.scale = given
        self.ratio_range = ratio_range
        self._resize_kwargs = resize_kwargs
        self._build(given if is_one_pair else given[0])  # Wrong keywords fail here, before the first image.

    def _build(self, scale: tuple[Above0, Above0]) -> BaseTransform:
        return Resize(scale, **self._resize_kwargs)

    def _drawn(self, rng: Random) -> BaseTransform:
        if self.ratio_range is not None:
            ratio = rng.uniform(*self.ratio_range)
            width, height = (int(side * ratio) for side in self.scale)
        else:
            width, height = (
                rng.randint(int(min(sides)), int(max(sides))) for sides in zip(*self.scale, strict=True)
            )
        return self._build((width, height))


@TRANSFORMS.register_module()
class RandomFlip(BaseTransform):
    """Flips the image and its boxes, and sets ``flip`` and ``flip_direction`` (``None`` if nothing is flipped).

    Args:
        prob: the probability of a flip, which all directions share evenly, or one probability for each direction.
        direction: ``'horizontal'``, ``'vertical'``, ``'diagonal'`` (both), or a list of them.

    Source: mmcv's RandomFlip.
    """

    moves_pixels = True

    @also_takes(swap_seg_labels=...)
    def __init__(
        self, prob: Share | Sequence[Share], direction: _Direction | Sequence[_Direction] = "horizontal"
    ) -> None:
        directions = [direction] if isinstance(direction, str) else list(direction)
        given: Any = prob
        number = len(directions)
        probs = given if isinstance(given, (list, tuple)) else [given / number] * number
        if len(probs) != number or sum(probs) > 1 + 1e-9:
            raise InvalidInputError(
                f"RandomFlip: prob must be 0..1, or one per direction summing to at most 1, got {prob}"
            )
        self.prob = prob
        self._directions = [*directions, None]
        self._probs = [*probs, max(1.0 - sum(probs), 0.0)]

    def planned_size(self, size: tuple[int, int], rng: Random) -> tuple[int, int]:
        rng.random()
        return size

    def transform(self, results: dict) -> dict:
        [direction] = sample_draws().choices(self._directions, self._probs)
        results["flip"] = direction is not None
        results["flip_direction"] = direction
        for flip, other in ((F.horizontal_flip, "vertical"), (F.vertical_flip, "horizontal")):
            if direction is None or direction == other:
                continue
            set_image(results, flip(results["img"]))
            if "gt_bboxes" in results:
                set_boxes(results, flip(results["gt_bboxes"]))
        return results


@TRANSFORMS.register_module()
class RandomCrop(BaseTransform):
    """Crops a random rectangle of the image, and drops the boxes outside it, also turned ones whose centre is outside.

    Args:
        crop_size: the size of the crop, whose meaning depends on ``crop_type``. A crop never exceeds the image.
        crop_type: the meaning of ``crop_size``. For ``'absolute'`` it is (width, height) in pixels, and for
            ``'relative'`` in parts of the image's. For ``'absolute_range'`` it is the smallest and the largest side in
            pixels, and height and width are drawn separately. For ``'relative_range'`` it is the smallest (height,
            width) in parts of the image's, and the largest is the image's.
        allow_negative_crop: accept a crop without any box. ``False`` returns ``None``, so that another image is taken.
        recompute_bbox: must be ``False``, because it needs instance masks, which visdet does not have.
        bbox_clip_border: clip the boxes to the crop.

    Raises:
        ValueError: an argument is not valid.

    Source: mmdet 3.3's RandomCrop.
    """

    moves_pixels = True

    def __init__(
        self,
        crop_size: tuple[float, float],
        crop_type: Literal["absolute", "absolute_range", "relative", "relative_range"] = "absolute",
        allow_negative_crop: bool = False,
        recompute_bbox: Literal[False] = False,
        bbox_clip_border: bool = True,
    ) -> None:
        what = f"RandomCrop: with crop_type={crop_type!r}, crop_size"
        self.crop_size: Any = checked_value(what, crop_size, _CROP_SIZES.get(crop_type, _Sides))
        self.crop_type = crop_type
        self.allow_negative_crop = allow_negative_crop
        self.bbox_clip_border = bbox_clip_border

    def _drawn(self, size: tuple[int, int], rng: Random) -> tuple[int, int, int, int]:
        """Return the (top, left, height, width) of the crop of an image of the (height, width) ``size``."""
        kind = self.crop_type
        first, second = self.crop_size
        if kind == "absolute":
            height, width = min(second, size[0]), min(first, size[1])
        elif kind == "absolute_range":
            height, width = (rng.randint(min(first, side), min(second, side)) for side in size)
        else:
            parts = [second, first]
            if kind == "relative_range":
                parts = [rng.uniform(least, 1) for least in self.crop_size]
            height, width = (max(1, int(side * part + 0.5)) for side, part in zip(size, parts, strict=True))
        top = rng.randint(0, size[0] - height)
        return top, rng.randint(0, size[1] - width), height, width

    def planned_size(self, size: tuple[int, int], rng: Random) -> tuple[int, int]:
        return self._drawn(size, rng)[2:]

    def transform(self, results: dict) -> dict | None:
        top, left, crop_h, crop_w = self._drawn(results["img_shape"], sample_draws())
        set_image(results, F.crop(results["img"], top, left, crop_h, crop_w))
        if "gt_bboxes" in results:
            boxes = moved(results["gt_bboxes"], -left, -top)
            kept = are_in(boxes, results["img_shape"])
            if not kept.any() and not self.allow_negative_crop:
                return None
            set_boxes(results, boxes, kept)
            if self.bbox_clip_border:
                set_boxes(results, clipped(results["gt_bboxes"]))
        return results


@TRANSFORMS.register_module()
class Pad(BaseTransform):
    """Adds a border on the right and at the bottom. ``img_shape`` becomes the padded size, and boxes stay as they are.

    The data preprocessor of a model pads batches, so that this transform is needed for fixed sizes only.

    Args:
        size: the padded (width, height), or one number for both.
        size_divisor: pad height and width to multiples of this number.
        pad_to_square: pad to a square first.
        pad_val: the value of the border: a number, one number per channel, or ``dict(img=...)`` of these. Other keys of
            the dict have no effect.
        padding_mode: must be ``'constant'``.

    Raises:
        ValueError: an argument is not valid, or the image is larger than ``size``.

    Source: mmcv's Pad.
    """

    def __init__(
        self,
        size: Positive | tuple[Positive, Positive] | None = None,
        size_divisor: Positive | None = None,
        pad_to_square: bool = False,
        pad_val: float | Sequence[float] | dict = 0,
        padding_mode: Literal["constant"] = "constant",
    ) -> None:
        if (size is not None) + (size_divisor is not None or pad_to_square) != 1:
            raise InvalidInputError(
                "Pad: give either size, or size_divisor and/or pad_to_square, "
                f"got {size=}, {size_divisor=}, {pad_to_square=}"
            )
        value = pad_val.get("img", 0) if isinstance(pad_val, dict) else pad_val
        self.pad_val = checked_value("Pad: pad_val", value, float | tuple[float, float, float])
        self.size = pair(size)
        self.size_divisor = size_divisor
        self.pad_to_square = pad_to_square

    def planned_size(self, size: tuple[int, int], rng: Random | None = None) -> tuple[int, int]:
        height, width = size
        target_w, target_h = self.size if self.size is not None else (width, height)
        if self.pad_to_square:
            target_w = target_h = max(width, height)
        divisor = self.size_divisor
        if divisor is not None:
            target_w, target_h = (-(-side // divisor) * divisor for side in (target_w, target_h))
        return target_h, target_w

    def transform(self, results: dict) -> dict:
        height, width = results["img_shape"]
        target_h, target_w = self.planned_size((height, width))
        if target_w < width or target_h < height:
            raise InvalidInputError(
                f"Pad: size (width, height) = {self.size} is smaller than the image, {width}x{height}: "
                f"{results.get('img_path')}"
            )
        border = [0, 0, target_w - width, target_h - height]
        set_image(results, F.pad(results["img"], border, fill=self.pad_val))
        results["pad_shape"] = results["img_shape"]
        if "gt_bboxes" in results:
            set_boxes(results, results["gt_bboxes"])
        return results
