"""Batches of images that are alike in shape."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from visdet.errors import InvalidTypeError
from visdet.registry import DATA_SAMPLERS

__all__ = ["AspectRatioBatchSampler"]


@DATA_SAMPLERS.register_module()
class AspectRatioBatchSampler(BatchSampler):
    """Batches that hold either upright images (width < height) or the others, so that little is padded.

    The order of the sampler is kept within each kind. What is left at the end of an epoch is batched
    together, so an epoch has ``ceil(n / batch_size)`` batches, or ``n // batch_size`` with ``drop_last``;
    never more, never fewer. An endless sampler (InfiniteSampler) gives endless batches.

    Args:
        sampler: gives positions in ``sampler.dataset``, whose ``get_data_info`` tells ``width`` and
            ``height``.
        batch_size: images per batch.
        drop_last: leave out the last batch of an epoch if it is not full.

    Source: mmdet's AspectRatioBatchSampler. Difference: with ``drop_last`` mmdet also loses a full last batch
    that is made of left-overs, and its length is then wrong.
    """

    def __init__(self, sampler: Sampler, batch_size: int, drop_last: bool = False) -> None:
        if not isinstance(sampler, Sampler):
            raise InvalidTypeError(
                f"AspectRatioBatchSampler: sampler must be a torch Sampler, got {type(sampler).__name__}"
            )
        dataset: Any = getattr(sampler, "dataset", None)
        if not hasattr(dataset, "get_data_info"):
            raise InvalidTypeError("AspectRatioBatchSampler: sampler.dataset must have get_data_info")
        super().__init__(sampler, batch_size, drop_last)
        self._dataset = dataset

    def __iter__(self) -> Iterator[list[int]]:
        waiting: dict[bool, list[int]] = {True: [], False: []}
        for index in self.sampler:
            record = self._dataset.get_data_info(index)
            batch = waiting[record["width"] < record["height"]]
            batch.append(index)
            if len(batch) == self.batch_size:
                yield batch[:]
                batch.clear()
        rest = waiting[True] + waiting[False]
        for start in range(0, len(rest), self.batch_size):
            batch = rest[start : start + self.batch_size]
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch
