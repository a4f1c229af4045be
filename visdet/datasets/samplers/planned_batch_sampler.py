"""Batches of few sizes, which are known before the images are read."""

import copy
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any

from mmengine.dataset import InfiniteSampler
from torch.utils.data import BatchSampler, Sampler

from visdet.checks.arguments import Positive
from visdet.registry import DATA_SAMPLERS
from visdet.structures.planned_batch import PlannedBatch, Size, first_for, union

from .batch_sizes import area, last_batches
from .planned_images import PlannedImage, PlannedImages
from .process_share import process_share
from .run_plan import plan_of

_AHEAD = 1024  # images that are planned ahead, so that the last batches of an epoch can be made of them


@DATA_SAMPLERS.register_module()
class PlannedBatchSampler(BatchSampler):
    """Makes batches of images of about the same size, which are padded to one of at most ``max_sizes`` sizes.

    The sizes are chosen from those that the data set and its pipeline give. Each image gets random numbers of its own,
    which depend on the seed, the epoch and its place in the order of the sampler alone. With these, the transforms say
    the size that the image will have (``planned_size``). The image waits until there are enough of its size for a batch
    of every process, so that all processes have the same size in the same step. What is left over at the end of an
    epoch goes into batches of larger sizes, so that an epoch has every image once and ``ceil(n / batch_size)`` batches,
    or ``n // batch_size`` with ``drop_last``. With an endless sampler (InfiniteSampler), the batches are endless, too.

    If a transform does not say what it does to the size, it is taken to keep it. Some images are then read at the start
    to see whether this is so. If not, batches are made as if it were, and padded to one of the sizes that were seen.

    Args:
        sampler: yields positions in ``sampler.dataset``, whose ``get_data_info`` returns ``width`` and ``height``.
        batch_size: number of images per batch.
        drop_last: leave out the last batch of an epoch if it is not full.
        max_sizes: the greatest number of sizes.
        rank, world_size: those of the process group by default.

    Attributes:
        sizes: the (height, width) of the batches, smallest area first.
        plan: what is known of every batch.
        rest: the number of images of this process's incomplete batch at the end of an epoch, 0 if there is none.

    Raises:
        TypeError: the sampler is not a torch Sampler, or its data set has no ``get_data_info``.
        ValueError: ``max_sizes`` is less than 1, or a record of the data set has no ``width`` and ``height``.
    """

    def __init__(
        self,
        sampler: Sampler,
        batch_size: int,
        drop_last: bool = False,
        max_sizes: Positive = 16,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        dataset: Any = getattr(sampler, "dataset", None)
        super().__init__(sampler, batch_size, drop_last)
        self._rank, self._world_size, self._seed = process_share(sampler, rank, world_size)
        self._images = PlannedImages(dataset, self._seed)
        self._run = plan_of(self._images, max_sizes)
        self.plan = self._run.batches
        self._number = batch_size * self._world_size  # the images of the batches of all processes
        is_complete = drop_last or isinstance(sampler, InfiniteSampler)
        surplus = 0 if is_complete else getattr(sampler, "total_size", len(dataset)) % self._number
        self.rest = len(range(self._rank, surplus, self._world_size))

    @property
    def sizes(self) -> tuple[Size, ...]:
        return self.plan.sizes

    def __iter__(self) -> Iterator[PlannedBatch]:
        epoch = getattr(self.sampler, "epoch", 0)
        waiting: dict[Size | None, list[PlannedImage]] = defaultdict(list)
        ahead: deque[PlannedImage] = deque()
        for position, index in enumerate(self._order()):
            ahead.append(self._images.image(index, position, epoch))
            if len(ahead) > _AHEAD:
                image = ahead.popleft()
                size = self._group_of(image)
                waiting[size].append(image)
                if len(waiting[size]) == self._number:
                    group = waiting.pop(size)
                    yield self._batch(size or union(one.size for one in group), group)
        yield from self._last([*chain(*waiting.values()), *ahead], epoch)

    def _last(self, images: list[PlannedImage], epoch: int) -> Iterator[PlannedBatch]:
        """Yield the batches of the images that are left at the end of an epoch."""
        # An image that is larger than all from which the sizes were chosen has a size of its own.
        larger = {image.size for image in images if self._group_of(image) is None}
        sizes = sorted({*self._run.groups, *larger}, key=area)
        rng = random.Random((self._seed << 80) + epoch)
        for size, members in last_batches(images, attrgetter("size"), sizes, self._number, rng):
            mine = self._batch(size, members)
            if len(mine) == self.batch_size or (len(mine) and not self.drop_last):
                yield mine

    def _group_of(self, image: PlannedImage) -> Size | None:
        """Return the smallest size of batches that holds an image, or None if it is larger than all of them."""
        return first_for(image.size, self._run.groups)

    def _batch(self, size: Size, images: list[PlannedImage]) -> PlannedBatch:
        """Return this process's share of the batches of all processes."""
        mine = images[self._rank :: self._world_size]
        plan = replace(self.plan, size=size if self._run.is_known else None)
        return PlannedBatch([image.item for image in mine], [image.seed for image in mine], plan)

    def _order(self) -> Iterator[int]:
        """Yield the indices of all processes in turn."""
        if self._world_size == 1:
            yield from self.sampler
            return
        shares = [_of_rank(self.sampler, rank) for rank in range(self._world_size)]
        for indices in zip_longest(*shares):
            yield from (index for index in indices if index is not None)


def _of_rank(sampler: Any, rank: int) -> Any:
    """Return a copy of a sampler that yields the indices of another process."""
    sampler = copy.copy(sampler)
    sampler.rank = rank
    if isinstance(sampler, InfiniteSampler):
        sampler.indices = sampler._indices_of_rank()
    return sampler
