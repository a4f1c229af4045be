"""Batches of portrait images and batches of other images."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from visdet.errors import InvalidTypeError
from visdet.registry import DATA_SAMPLERS


@DATA_SAMPLERS.register_module()
class AspectRatioBatchSampler(BatchSampler):
    """Makes batches of portrait images (width < height) and batches of other images, so that little is padded.

    The order of the sampler is kept within each kind. Images that are left at the end of an epoch are batched together,
    so that an epoch always has ``ceil(n / batch_size)`` batches, or ``n // batch_size`` with ``drop_last``. With an
    endless sampler (InfiniteSampler), the batches are endless, too.

    Args:
        sampler: yields positions in ``sampler.dataset``, whose ``get_data_info`` returns ``width`` and ``height``.
        batch_size: number of images per batch.
        drop_last: leave out the last batch of an epoch if it is not full.

    Raises:
        ValueError: the sampler is not a torch Sampler.
        TypeError: its data set has no ``get_data_info``.

    Source: mmdet's AspectRatioBatchSampler. Difference: with ``drop_last``, mmdet also loses a full last batch that
    consists of images of both kinds, and its length is then wrong.
    """

    def __init__(self, sampler: Sampler, batch_size: int, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)
        dataset: Any = getattr(sampler, "dataset", None)
        if not hasattr(dataset, "get_data_info"):
            raise InvalidTypeError(
                f"AspectRatioBatchSampler: the sampler's data set must have get_data_info, got {type(dataset).__name__}"
            )
        self._dataset = dataset

    def __iter__(self) -> Iterator[list[int]]:
        size = self.batch_size
        waiting: dict[bool, list[int]] = {True: [], False: []}
        for index in self.sampler:
            record = self._dataset.get_data_info(index)
            batch = waiting[record["width"] < record["height"]]
            batch.append(index)
            if len(batch) == size:
                yield batch[:]
                batch.clear()
        rest = waiting[True] + waiting[False]
        for start in range(0, len(rest), size):
            batch = rest[start : start + size]
            if len(batch) == size or not self.drop_last:
                yield batch
