"""Transforms that choose among others, wrap torchvision's, or join several images."""

from collections.abc import Callable, Sequence
from contextvars import Context
from itertools import takewhile
from random import Random
from typing import Any

import torch
from mmengine.dataset import Compose
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from visdet.checks.arguments import AtLeast0, Positive, SameAs, Share, also_takes, with_other_names
from visdet.errors import InvalidInputError
from visdet.registry import TRANSFORMS
from visdet.structures.planned_batch import sample_draws

from .base import BaseTransform, DrawnTransform, composed, uniform, uniform_int
from .tv_results import PER_BOX, clipped, moved, set_image, set_large_boxes


@TRANSFORMS.register_module()
class RandomChoice(DrawnTransform):
    """Applies one of several pipelines.

    Args:
        transforms: the pipelines. Each is a list of transforms or a single one.
        prob: their probabilities, which sum to 1. By default all are equal.

    Source: mmcv's RandomChoice.
    """

    def __init__(
        self,
        transforms: Sequence[dict | Callable | Sequence[dict | Callable]],
        prob: Sequence[AtLeast0] | None = None,
    ) -> None:
        if prob is not None and (len(prob) != len(transforms) or abs(sum(prob) - 1) > 1e-6):
            raise InvalidInputError(
                f"RandomChoice: prob must be {len(transforms)} numbers that sum to 1, got {list(prob)}"
            )
        self.prob = prob
        listed = [steps if isinstance(steps, (list, tuple)) else [steps] for steps in transforms]
        self.transforms = [composed(steps) for steps in listed]

    def _drawn(self, rng: Random) -> Compose:
        [drawn] = rng.choices(self.transforms, self.prob)
        return drawn


@TRANSFORMS.register_module()
class TorchvisionTransform(BaseTransform):
    """Applies a transform of ``torchvision.transforms.v2``, which is given by its name, to the image and its boxes.

    An example is ``dict(type='TorchvisionTransform', transform='RandomRotation', degrees=10)``. Boxes are clipped to
    the new image, and those that are then less than one pixel wide or high are dropped. Turned boxes are not clipped,
    but dropped if their centre is outside. ``scale_factor`` is not changed, so use transforms that move pixels for
    training only. The others see the colours as torchvision's: in the order RGB, and in 0..1 if they are floating-point
    numbers.

    Args:
        transform: the name of a class in ``torchvision.transforms.v2``.
        **arguments: its arguments.

    Raises:
        ValueError: torchvision has no such transform or refuses the arguments, or the transform has changed the number
            of boxes.
    """

    def __init__(self, transform: str, **arguments: Any) -> None:
        transform_class = getattr(v2, transform, None)
        if not (isinstance(transform_class, type) and issubclass(transform_class, v2.Transform)):
            raise InvalidInputError(
                f"TorchvisionTransform: torchvision.transforms.v2 has no transform {transform!r}"
            )
        self.transform_name = transform
        module = transform_class.__module__
        self.keeps_size = module.endswith("_color")  # type: ignore[misc]
        self.moves_pixels = module.endswith(("_container", "_geometry"))
        self._transform = transform_class(**arguments)

    def transform(self, results: dict) -> dict:
        given = results["img"]
        is_bgr = results.get("channel_order") == "bgr"
        image = given if self.moves_pixels else _as_of_torchvision(given, is_bgr)
        boxes = results.get("gt_bboxes")
        if boxes is None:
            image = self._transform(image)
        else:
            number = len(boxes)
            image, boxes = self._transform(image, boxes)
            if len(boxes) != number:
                raise InvalidInputError(
                    f"TorchvisionTransform: {self.transform_name} changed the number of boxes"
                )
        if image.dtype != given.dtype:
            raise InvalidInputError(
                f"TorchvisionTransform: {self.transform_name} changed the type of the image from {given.dtype} to "
                f"{image.dtype}. LoadImageFromFile gives float32 with to_float32=True"
            )
        set_image(results, image if self.moves_pixels else _as_before(image, is_bgr))
        if boxes is not None:
            set_large_boxes(results, clipped(boxes))
        return results


def _as_of_torchvision(image: Tensor, is_bgr: bool) -> Tensor:
    """Return an image as torchvision's transforms of colours expect it."""
    rgb = image.flip(0) if is_bgr else image
    return tv_tensors.Image(rgb / 255 if rgb.is_floating_point() else rgb)


def _as_before(image: Tensor, is_bgr: bool) -> Tensor:
    scaled = image * 255 if image.is_floating_point() else image
    return scaled.flip(0) if is_bgr else scaled


class MixingTransform(BaseTransform):
    """Joins an image with others of its data set.

    A CocoDataset gives the other images by ``draw_record`` and its own pipeline by ``pipeline`` of the results. The
    steps of that pipeline before the first one that joins images read the other images as they read this one.

    Args:
        pipeline: the transforms that read another image and its annotations, instead of those of the data set.
        prob: the probability that images are joined.

    Raises:
        ValueError: the data set gives no other images, or no ``pipeline`` is given and that of the data set has no step
            before the one that joins images.
    """

    moves_pixels = True

    def __init__(self, pipeline: Sequence[dict | Callable] | None = None, prob: Share = 0.5) -> None:
        self._read: Compose | None = None
        if pipeline is not None:
            self._read = composed(pipeline)
        self.prob = prob

    def others(self, results: dict, number: int) -> list[dict]:
        """Return the results of other images, which are drawn at random.

        They do not draw from the random numbers of the sample, by which the size of the result is planned.
        """
        if "draw_record" not in results:
            raise InvalidInputError(
                f"{type(self).__name__}: the data set gives no other images to join, as a CocoDataset does"
            )
        read = self._read or self._reader_of(results.get("pipeline"))
        found = [Context().run(read, results["draw_record"]()) for _ in range(number)]
        return [other for other in found if other is not None]

    def _reader_of(self, pipeline: Compose | None) -> Compose:
        """Return the steps of the pipeline of a data set before the first one that joins images."""
        steps = list(takewhile(_joins_nothing, getattr(pipeline, "transforms", ())))
        if not steps:
            raise InvalidInputError(
                f"{type(self).__name__}: the pipeline of the data set has no step before the one that joins images; "
                "give pipeline=[...], the transforms that read another image and its annotations"
            )
        return Compose(steps)

    def joined(self, results: dict, image: Tensor, parts: Sequence[dict]) -> dict:
        """Return the results with an image and with the boxes of all parts, which are in its pixels."""
        orders = {str(part.get("channel_order")) for part in parts}
        if len(orders) > 1:
            raise InvalidInputError(
                f"{type(self).__name__}: the channels of the images to join are in the orders "
                f"{' and '.join(sorted(orders))}. Give every LoadImageFromFile the same channel_order"
            )
        set_image(results, image)
        for key in PER_BOX:
            # Images without boxes, and all images outside of tests, have no areas.
            values = [part[key] for part in parts if key in part]
            if values:
                results[key] = torch.cat(values)
        boxes = torch.cat([part["gt_bboxes"].as_subclass(Tensor) for part in parts])
        set_large_boxes(results, boxes)
        return results


def _joins_nothing(step: Any) -> bool:
    """Return whether neither a step of a pipeline nor one within it joins images."""
    return not isinstance(step, MixingTransform) and all(map(_joins_nothing, getattr(step, "transforms", ())))


@TRANSFORMS.register_module()
class Mosaic(MixingTransform):
    """Fills four rectangles around a random point with the image and three others, each scaled to cover its rectangle.

    What goes beyond a rectangle is cut off. Boxes are clipped to what is left of their image, and those that are then
    less than one pixel wide or high are dropped. Turned boxes are not clipped, but dropped if their centre is outside.

    Args:
        size: the (width, height) of the result.
        pipeline, prob: see :class:`MixingTransform`.

    Source: the name is YOLOv4's (arXiv 2004.10934). Difference: no part of the result is empty.
    """

    # The four images cover the whole result, so that nothing is padded.
    @also_takes(img_scale=SameAs("size"), bbox_clip_border=True, pad_val=...)
    @with_other_names({"center_ratio_range": "nothing: the images meet between 0.3 and 0.7 of each side"})
    def __init__(
        self,
        size: tuple[Positive, Positive],
        pipeline: Sequence[dict | Callable] | None = None,
        prob: Share = 0.5,
    ) -> None:
        super().__init__(pipeline, prob)
        self.size = size

    def planned_size(self, size: tuple[int, int], rng: Random) -> tuple[int, int]:
        return (self.size[1], self.size[0]) if rng.uniform(0, 1) < self.prob else size

    def transform(self, results: dict) -> dict:
        if sample_draws().uniform(0, 1) >= self.prob:
            return results
        parts = [dict(results), *self.others(results, 3)]
        width, height = self.size
        x, y = (int(side * uniform(0.3, 0.7)) for side in self.size)
        image = results["img"].new_zeros(3, height, width)
        places = [(0, 0, x, y), (x, 0, width, y), (0, y, x, height), (x, y, width, height)]
        for part, (left, top, right, bottom) in zip(parts, places, strict=False):
            rows = bottom - top
            columns = right - left
            h, w = part["img_shape"]
            factor = max(columns / w, rows / h)
            new_h = max(round(h * factor), rows)
            new_w = max(round(w * factor), columns)
            size = [new_h, new_w]
            window = (uniform_int(0, new_h - rows), uniform_int(0, new_w - columns), rows, columns)
            boxes = F.crop(F.resize(part["gt_bboxes"], size), *window)
            set_image(part, F.crop(F.resize(part["img"], size, antialias=False), *window))
            image[:, top:bottom, left:right] = part["img"]
            set_large_boxes(part, clipped(boxes))
            part["gt_bboxes"] = moved(part["gt_bboxes"], left, top)
        return self.joined(results, image, parts)


@TRANSFORMS.register_module()
class MixUp(MixingTransform):
    """Blends the image with another one, which is scaled to its size. The boxes of both count.

    Args:
        share: the range of the part of the other image.
        pipeline, prob: see :class:`MixingTransform`.

    Source: mixup (arXiv 1710.09412), for detection as in YOLOX (arXiv 2107.08430).
    """

    keeps_size = True

    # The other image is resized to the size of the first one, so that nothing is padded, and any image will do.
    @also_takes(bbox_clip_border=True, flip_ratio=0, pad_val=..., max_iters=...)
    @with_other_names(
        {
            "img_scale": "nothing: the other image is resized to the size of the first one",
            "ratio_range": "share=(least, most) of the other image",
        }
    )
    def __init__(
        self,
        share: tuple[Share, Share] = (0.4, 0.5),
        pipeline: Sequence[dict | Callable] | None = None,
        prob: Share = 0.5,
    ) -> None:
        super().__init__(pipeline, prob)
        self.share = share

    def transform(self, results: dict) -> dict:
        others: list[Any] = self.others(results, 1) if uniform(0, 1) < self.prob else []
        for other in others:
            size = list(results["img_shape"])
            share = uniform(*self.share)
            image = results["img"].float() * (1 - share) + F.resize(other["img"], size).float() * share
            other["gt_bboxes"] = F.resize(other["gt_bboxes"], size)
            results = self.joined(results, image.to(results["img"].dtype), [dict(results), other])
        return results
