"""Batches whose images get random numbers and a padded size of their own before they are read."""

from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

Size = tuple[int, int]  # (height, width)


class TorchDraws(Random):
    """The random numbers of torch's global generator."""

    def random(self) -> float:
        return torch.rand((), dtype=torch.float64).item()

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * torch.rand(()).item()

    def randint(self, a: int, b: int) -> int:
        return int(torch.randint(a, b + 1, ()))


TORCH_DRAWS = TorchDraws()

_draws: ContextVar[Random] = ContextVar("visdet_sample_draws", default=TORCH_DRAWS)
_read: ContextVar["BatchPlan | None"] = ContextVar("visdet_batch_read", default=None)


def sample_draws() -> Random:
    """Return the random numbers of the sample that is being read, or those of torch if it was not planned.

    Transforms that change the size of an image draw from them, so that the size is known before the image is read.
    """
    return _draws.get()


@dataclass(frozen=True)
class BatchPlan:
    """What a batch sampler knows of a batch before its images are read.

    Attributes:
        size: the (height, width) of the padded batch, or None if it follows from the images.
        sizes: the sizes that batches of the run have, smallest area first.
        filled: those of the sizes whose images are not padded.
        boxes: the numbers of boxes to which the boxes of an image are padded, the smallest first.
    """

    size: Size | None
    sizes: tuple[Size, ...]
    filled: frozenset[Size] = frozenset()
    boxes: tuple[int, ...] = ()

    def size_for(self, images: Sequence[Size]) -> Size:
        """Return the size of the batch with images of these sizes.

        Images may be larger than planned, for example if the pipeline has rejected one and another was taken. The batch
        then gets the smallest of the run's sizes that holds them, or their own size if none does.
        """
        needed = union(images)
        return first_for(needed, self.sizes if self.size is None else (self.size, *self.sizes)) or needed

    def write(self, samples: Sequence[Any], size: Size) -> None:
        """Write into the samples of a batch what all batches of a size have in common, so that they have one layout."""
        batch = {
            "batch_input_shape": size,
            "batch_is_padded": size not in self.filled,
            "batch_boxes": self.boxes,
        }
        for sample in samples:
            sample.set_metainfo(batch)


class PlannedBatch(list):
    """The indices of a batch. While one iterates over it, each sample has its own random numbers.

    A loader reads the samples in such an iteration, in the training process or in a worker.

    Args:
        indices: the indices of the samples. seeds: the seed of each. plan: what is known of the batch.
    """

    def __init__(self, indices: Sequence[int], seeds: Sequence[int], plan: BatchPlan) -> None:
        super().__init__(indices)
        self.seeds = seeds
        self.plan = plan

    def __iter__(self) -> Iterator[int]:
        try:
            for index, seed in zip(super().__iter__(), self.seeds, strict=True):
                _draws.set(Random(seed))
                yield index
            _read.set(self.plan)
        finally:
            _draws.set(TORCH_DRAWS)

    def __reduce__(self) -> tuple[Any, ...]:
        return PlannedBatch, (self[:], self.seeds, self.plan)


def say_size(batch: Any) -> None:
    """Write the planned size of the batch that was read last into its samples, as ``batch_input_shape``.

    Args:
        batch: the collated samples. Nothing is done if they were not planned.
    """
    plan = _read.get()
    if plan is None:
        return
    _read.set(None)
    match batch:
        case {"inputs": images, "data_samples": [*samples]}:
            plan.write(samples, plan.size_for([tuple(image.shape[-2:]) for image in images]))


def holds(size: Size, other: Size) -> bool:
    """Return whether an image of the (height, width) ``other`` fits into one of ``size``."""
    return size[0] >= other[0] and size[1] >= other[1]


def first_for(size: Size, sizes: Iterable[Size]) -> Size | None:
    """Return the first of ``sizes`` into which an image of a size fits, or None."""
    return next((one for one in sizes if holds(one, size)), None)


def union(sizes: Iterable[Size]) -> Size:
    """Return the least (height, width) that holds all sizes."""
    heights, widths = zip(*sizes, strict=True)
    return max(heights), max(widths)


def largest(sizes: Sequence[Size]) -> list[Size]:
    """Return those of the sizes that fit into no other one."""
    found = []
    for size in sizes:
        holding = {other for other in sizes if holds(other, size)}
        if holding == {size}:
            found.append(size)
    return found
