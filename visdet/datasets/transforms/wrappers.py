"""Transforms that apply other transforms."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from mmengine.dataset import Compose
from torchvision.transforms import v2

from visdet.errors import InvalidInputError
from visdet.registry import TRANSFORMS

from .base import BaseTransform, DrawnTransform, choose
from .tv_results import set_boxes, set_image


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
        prob: Sequence[float] | None = None,
    ) -> None:
        if prob is not None and (len(prob) != len(transforms) or min(prob) < 0 or abs(sum(prob) - 1) > 1e-6):
            raise InvalidInputError(
                f"RandomChoice: prob must be {len(transforms)} numbers that sum to 1, got {list(prob)}"
            )
        self.prob = prob
        self.transforms = [_compose(steps) for steps in transforms]

    def _drawn(self, rng: Random | None) -> Compose:
        probabilities = self.prob or [1 / len(self.transforms)] * len(self.transforms)
        return self.transforms[choose(probabilities, rng=rng)]


def _compose(steps: dict | Callable | Sequence[dict | Callable]) -> Compose:
    listed: Any = steps if isinstance(steps, (list, tuple)) else [steps]
    return Compose([TRANSFORMS.build(step) if isinstance(step, dict) else step for step in listed])


@TRANSFORMS.register_module()
class TorchvisionTransform(BaseTransform):
    """Applies a transform of ``torchvision.transforms.v2``, which is given by its name, to the image and its boxes.

    An example is ``dict(type='TorchvisionTransform', transform='RandomRotation', degrees=10)``. Boxes are clipped to
    the new image, and those that are then less than one pixel wide or high are dropped. ``scale_factor`` is not
    changed, so use transforms that move pixels for training only.

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
        self.keeps_size = transform_class.__module__.endswith("_color")  # type: ignore[misc]
        self.arguments = arguments
        self._transform = transform_class(**arguments)

    def transform(self, results: dict) -> dict:
        if "gt_bboxes" not in results:
            set_image(results, self._transform(results["img"]))
            return results
        image, boxes = self._transform(results["img"], results["gt_bboxes"])
        if len(boxes) != len(results["gt_bboxes"]):
            raise InvalidInputError(
                f"TorchvisionTransform: {self.transform_name} changed the number of boxes"
            )
        set_image(results, image)
        boxes = v2.functional.clamp_bounding_boxes(boxes).as_subclass(torch.Tensor)
        set_boxes(results, boxes, keep=(boxes[:, 2:] - boxes[:, :2] >= 1).all(dim=1))
        return results
