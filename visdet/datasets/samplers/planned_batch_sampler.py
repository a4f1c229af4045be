"""Batch samplers that know the size of each image before it is read: for few sizes, and for two orientations."""

import copy
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.dataset import InfiniteSampler
from mmengine.dist import broadcast_object_list, get_dist_info, sync_random_seed
from torch.utils.data import BatchSampler, Sampler

from visdet.checks.arguments import Positive
from visdet.errors import InvalidInputError
from visdet.registry import DATA_SAMPLERS
from visdet.structures.planned_batch import BatchPlan, PlannedBatch, Size, holds

from ..transforms.base import planned_size
from .batch_sizes import choose_sizes, last_batches, union

_DRAWN = 20_000  # images from which the sizes are chosen
_READ = 64  # images that are read if the pipeline does not say which sizes it gives
_BOX_STEP = 16
_FEW_BOXES = 64  # padding to which costs nothing that can be measured
_USUAL = 0.99  # of all images have no more boxes
_AHEAD = 1024  # images that are planned ahead, so that the last batches of an epoch can be made of them


class _Image(NamedTuple):
    """An image of an epoch: its index in the data set, its seed, and the size that it will have."""

    item: int
    seed: int
    size: Size


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
        self._dataset = dataset
        given_rank, given_world_size = get_dist_info()
        self._rank = given_rank if rank is None else rank
        self._world_size = given_world_size if world_size is None else world_size
        seed = getattr(sampler, "seed", None)
        self._seed = int(sync_random_seed() if seed is None else seed)
        self._steps: dict[int, list[Any]] = {}
        self._is_silent = False
        self._files, boxes = self._read_records()
        drawn = self._drawn_images()
        # Each size of a file is among them more than once, so that they are all if none is drawn at random.
        given = {(self._files[image.item], image.size) for image in drawn}
        are_all = len(given) == len({size for size, _ in given}) and not self._is_silent
        self._groups = choose_sizes([i.size for i in drawn], max_sizes, are_all) if drawn else ()
        sizes, self._is_known = self._groups, True
        if self._is_silent:
            seen = copy_context().run(self._seen_sizes, drawn)
            if seen != [image.size for image in drawn[:_READ]]:
                # A batch may hold any two images that are planned to fit into one of the largest sizes.
                tops = BatchPlan(None, self._groups).largest()
                joined = [
                    [s for i, s in zip(drawn, seen, strict=False) if holds(top, i.size)] for top in tops
                ]
                sizes = choose_sizes([*seen, *map(union, filter(None, joined))], max_sizes)
                self._is_known = False
            common: list[Any] = [sizes, self._is_known]
            # What a transform of the user's draws may differ between processes.
            broadcast_object_list(common)
            sizes, self._is_known = common
        found = {image.size for image in drawn} if are_all else set()
        filled = frozenset(sizes) if found == set(sizes) else frozenset()
        # The boxes of an image are padded to one number, or to one of two if few images have many.
        most, usual = (
            -(-max(int(np.quantile(boxes or [0], share)), 1) // _BOX_STEP) * _BOX_STEP
            for share in (1, _USUAL)
        )
        usual = max(usual, _FEW_BOXES)
        rooms = (most,) if most < 2 * usual else (usual, most)
        self.plan = BatchPlan(None, sizes, filled, rooms)
        count = getattr(sampler, "total_size", len(self._files))
        surplus = (
            0
            if drop_last or isinstance(sampler, InfiniteSampler)
            else count % (batch_size * self._world_size)
        )
        self.rest = len(range(self._rank, surplus, self._world_size))

    @property
    def sizes(self) -> tuple[Size, ...]:
        return self.plan.sizes

    def _read_records(self) -> tuple[list[Size], list[int]]:
        """Return the (height, width) of all files, and their numbers of boxes."""
        files, boxes = [], []
        for index in range(len(self._dataset)):
            record = self._dataset.get_data_info(index)
            if not {"height", "width"} <= record.keys():
                raise InvalidInputError(
                    f"PlannedBatchSampler: the records of {type(self._dataset).__name__} must have height and width, "
                    f"got {sorted(record)}"
                )
            files.append((int(record["height"]), int(record["width"])))
            boxes.append(len(record.get("instances", ())))
        return files, boxes

    def _drawn_images(self) -> list[_Image]:
        """Return images from which the sizes are chosen: a part of the data set, and each size of a file once."""
        count = len(self._files)
        rng = random.Random(0)
        indices = [rng.randrange(count) for _ in range(_DRAWN)] if count > _DRAWN else [*range(count)]
        indices *= -(-min(_DRAWN, 100 * count) // max(len(indices), 1))
        indices += {size: index for index, size in enumerate(self._files)}.values()
        return [self._planned(index, position, epoch=-1) for position, index in enumerate(indices)]

    def _planned(self, index: int, position: int, epoch: int) -> _Image:
        """Return the image at a position of the order of an epoch."""
        seed = (self._seed << 80) + ((epoch + 1) << 48) + position
        size: Size = self._files[index]
        rng = random.Random(seed)
        for step in self._steps_of(index):
            planned = planned_size(step, size, rng)
            self._is_silent |= planned is None
            size = planned or size
        return _Image(index, seed, size)

    def _steps_of(self, index: int) -> list[Any]:
        """Return the steps of the pipeline of an image that may change its size."""
        dataset = self._dataset
        while not hasattr(dataset, "pipeline") and hasattr(dataset, "_get_ori_dataset_idx"):
            within = dataset._get_ori_dataset_idx(index)  # one of mmengine's wrappers
            part, index = within if isinstance(within, tuple) else (None, within)
            dataset = dataset.dataset if part is None else dataset.datasets[part]
        pipeline = getattr(dataset, "pipeline", None)
        if id(pipeline) not in self._steps:
            steps = getattr(pipeline, "transforms", [pipeline])
            self._steps[id(pipeline)] = [step for step in steps if not getattr(step, "keeps_size", False)]
        return self._steps[id(pipeline)]

    def _seen_sizes(self, images: list[_Image]) -> list[Size]:
        """Return the sizes of the first images, which are read for this."""
        with _random_state_of_its_own():
            return [
                tuple(self._dataset[index]["inputs"].shape[-2:])
                for image in images[:_READ]
                for index in PlannedBatch([image.item], [image.seed], BatchPlan(None, ()))
            ]

    def __iter__(self) -> Iterator[PlannedBatch]:
        number = self.batch_size * self._world_size
        epoch = getattr(self.sampler, "epoch", 0)
        waiting: dict[Size | None, list[_Image]] = defaultdict(list)
        group_of: dict[Size, Size | None] = {}
        ahead: deque[_Image] = deque()
        for position, index in enumerate(self._order()):
            ahead.append(self._planned(index, position, epoch))
            if len(ahead) <= _AHEAD:
                continue
            image = ahead.popleft()
            if image.size not in group_of:
                group_of[image.size] = next((one for one in self._groups if holds(one, image.size)), None)
            group = waiting[group_of[image.size]]
            group.append(image)
            if len(group) == number:
                yield self._batch(group_of[image.size] or union(one.size for one in group), group)
                group.clear()
        rest = [image for group in waiting.values() for image in group] + list(ahead)
        # An image that is larger than all from which the sizes were chosen has a size of its own.
        sizes = {image.size for image in rest if not any(holds(one, image.size) for one in self._groups)}
        groups = sorted({*self._groups, *sizes}, key=lambda size: size[0] * size[1])
        rng = random.Random((self._seed << 80) + epoch)
        for group_size, images in last_batches(rest, lambda image: image.size, groups, number, rng):
            mine = self._batch(group_size, images)
            if len(mine) == self.batch_size or (len(mine) and not self.drop_last):
                yield mine

    def _batch(self, size: Size | None, images: list[_Image]) -> PlannedBatch:
        """Return this process's share of a batch of all processes."""
        mine = images[self._rank :: self._world_size]
        plan = replace(self.plan, size=size if self._is_known else None)
        return PlannedBatch([image.item for image in mine], [image.seed for image in mine], plan)

    def _order(self) -> Iterator[int]:
        """Yield the indices of all processes in turn."""
        if self._world_size == 1:
            yield from self.sampler
            return
        shares = [_of_rank(self.sampler, rank) for rank in range(self._world_size)]
        for indices in itertools.zip_longest(*shares):
            yield from (index for index in indices if index is not None)


def _of_rank(sampler: Any, rank: int) -> Any:
    """Return a copy of a sampler that yields the indices of another process."""
    sampler = copy.copy(sampler)
    sampler.rank = rank
    if isinstance(sampler, InfiniteSampler):
        sampler.indices = sampler._indices_of_rank()
    return sampler


@contextmanager
def _random_state_of_its_own() -> Iterator[None]:
    """Let the block draw the same random numbers in every process, and no others afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (transforms may use it)
    with torch.random.fork_rng(devices=[]):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
