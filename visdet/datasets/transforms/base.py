"""The base classes of transforms, and the random numbers that they may use."""

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from mmengine.dataset import Compose

from visdet.errors import InvalidInputError, UserError
from visdet.registry import TRANSFORMS, built
from visdet.structures.planned_batch import TORCH_DRAWS, sample_draws

# What the names of results begin with, which other transforms read.
_RESULTS = ("img", "ori_shape", "gt_", "instances", "points", "lidar")


class BaseTransform(metaclass=ABCMeta):
    """A step of a data pipeline, which changes a dict of results and returns it.

    The dict has these keys:

    * ``img`` (``tv_tensors.Image``, uint8 [3, H, W]), ``img_path`` and ``img_id``;
    * ``ori_shape`` and ``img_shape``, the (height, width) of the file's image and of ``img``;
    * ``scale_factor``, the (width, height) of ``img`` divided by the (width, height) of the file's image;
    * ``flip`` and ``flip_direction``;
    * ``gt_bboxes`` (``tv_tensors.BoundingBoxes`` [N, 4] (x1, y1, x2, y2), float32, in pixels of ``img``), or the
      corners of turned boxes (``Corners`` [N, 4, 2], key points of torchvision's);
    * ``gt_bboxes_labels`` (int64 [N]), and ``gt_ignore_flags`` (bool [N], True for crowd regions).

    A transform that keeps the size of the image says so by ``keeps_size``. Another one should have a method
    ``planned_size(size, rng)``, which returns the (height, width) that ``transform`` will give an image of the
    (height, width) ``size``. It draws the same random numbers from ``rng`` that ``transform`` draws from
    ``sample_draws()``. PlannedBatchSampler then knows the size of an image before it is read (see docs/batches.md).

    All other random numbers come from torch's global generator, which training seeds for each batch, so that they do
    not depend on the number of workers.

    Source: the names and keywords of the transforms are those of mmcv and mmdet. The image is a torchvision tv_tensor
    instead of a numpy array.
    """

    keeps_size: ClassVar[bool] = False  # whether the image has the same size afterwards
    moves_pixels = False  # whether pixels are afterwards elsewhere than ``scale_factor`` says

    @abstractmethod
    def transform(self, results: dict) -> dict | None:
        """Return the changed results, or ``None`` to ask the data set for another image."""

    def __call__(self, results: dict) -> dict | None:
        try:
            changed = self.transform(results)
        except KeyError as error:
            key = str(error.args[0])
            if isinstance(error, UserError) or key in results or not key.startswith(_RESULTS):
                raise
            raise InvalidInputError(
                f"{type(self).__name__}: the pipeline has no {key!r} yet; an earlier transform must give it"
            ) from error
        if changed is not None and self.moves_pixels:
            changed["moved_by"] = type(self).__name__
        return changed

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{key}={value!r}" for key, value in vars(self).items() if not key.startswith("_")
        )
        return f"{type(self).__name__}({settings})"


def composed(steps: Sequence[Any]) -> Compose:
    """Return a pipeline of steps, which may be given as configs. Names without a scope mean visdet's."""
    return Compose([built(step, TRANSFORMS) for step in steps])


class DrawnTransform(BaseTransform):
    """Applies a transform or a pipeline that it draws."""

    @abstractmethod
    def _drawn(self, rng: Random) -> Any:
        """Return what to apply, drawn from ``rng``."""

    def planned_size(self, size: tuple[int, int], rng: Random) -> tuple[int, int] | None:
        return planned_size(self._drawn(rng), size, rng)

    def transform(self, results: dict) -> dict | None:
        return self._drawn(sample_draws())(results)


def planned_size(step: Any, size: tuple[int, int], rng: Random) -> tuple[int, int] | None:
    """Return the (height, width) that a step of a pipeline will give an image of ``size``, or None if it does not say.

    Args:
        step: a transform, a pipeline or any other callable.
        size: the (height, width) before the step.
        rng: the random numbers of the sample.
    """
    if getattr(step, "keeps_size", False):
        return size
    if isinstance(step, Compose):
        planned: tuple[int, int] | None = size
        for inner in step.transforms:
            planned = planned and planned_size(inner, planned, rng)
        return planned
    plan = getattr(step, "planned_size", None)
    return None if plan is None else plan(size, rng)


def keep_rows(results: dict, keys: Sequence[str], mask: Any) -> None:
    """Replace those of the results with these keys that are there by their rows where ``mask`` is True."""
    for key in keys:
        if key in results:
            results[key] = results[key][mask]


def pair(value: Any) -> Any:
    """Return a pair, for both numbers of which a single one may stand, or None for None."""
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return None if value is None else (value, value)


# Whatever does not change the size of an image draws from torch's generator.
uniform = TORCH_DRAWS.uniform
uniform_int = TORCH_DRAWS.randint
