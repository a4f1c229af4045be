"""Batches of indices that can start in the middle, so that a resumed run loads no image twice."""

import itertools
from collections.abc import Iterator
from functools import partial

from torch.utils.data import DataLoader, Sampler

from visdet.errors import InvalidInputError

__all__ = ["ResumableBatches", "reseed_workers"]

# A prime far above any number of workers, so that worker seeds of two starting points do not meet.
_SEED_STRIDE = 100_003


class ResumableBatches:
    """The index batches of a batch sampler, from the ``start``-th on.

    Skipping costs index arithmetic only: no image of a skipped batch is read. ``start`` holds for the next
    iteration and is then forgotten.

    Args:
        batch_sampler: any sampler of index lists.
        endless: go on with the next epoch (``sampler.set_epoch``) where an epoch ends, for iteration-based
            training; the loader's workers then live as long as the run.

    Raises:
        ValueError: an endless sampler has an epoch without a batch.
    """

    def __init__(self, batch_sampler: Sampler[list[int]], endless: bool) -> None:
        self.batch_sampler = batch_sampler
        self.endless = endless
        self.start = 0

    @classmethod
    def install(cls, dataloader: DataLoader, endless: bool) -> "ResumableBatches":
        """Put resumable batches in the place of a loader's batch sampler and return them.

        Raises:
            ValueError: the loader has no batch sampler (an iterable data set, or batch_size=None).
        """
        if dataloader.batch_sampler is None:
            raise InvalidInputError(
                "train_dataloader must give batches of indices of a map-style data set, got "
                f"{type(dataloader.dataset).__name__} without a batch sampler"
            )
        batches = cls(dataloader.batch_sampler, endless)
        # DataLoader refuses the assignment because a running iterator would not see it; none runs yet.
        vars(dataloader)["batch_sampler"] = batches
        return batches

    @property
    def sampler(self) -> Sampler[int] | None:
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def batch_size(self) -> int:
        return self.batch_sampler.batch_size

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so that this runs at the first batch: DataLoader calls iter() more often than it
        # iterates.
        start, self.start = self.start, 0
        batches = self._epoch_after_epoch() if self.endless else iter(self.batch_sampler)
        yield from itertools.islice(batches, start, None)

    def _epoch_after_epoch(self) -> Iterator[list[int]]:
        for epoch in itertools.count():
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            is_empty = True
            for batch in self.batch_sampler:
                is_empty = False
                yield batch
            if is_empty:
                raise InvalidInputError(
                    f"train_dataloader gives no batch: {type(self.batch_sampler).__name__} of batch size "
                    f"{self.batch_size} found nothing to batch in its data set"
                )


def reseed_workers(dataloader: DataLoader, seed: int, iteration: int) -> None:
    """Seed the workers that a loader starts next by ``seed`` and the iteration they start at.

    mmengine gives workers the same seeds at every start: augmentations would repeat after each resume, and in
    each epoch without persistent workers.
    """
    init = dataloader.worker_init_fn
    if isinstance(init, partial) and "seed" in init.keywords:
        seed = (seed + _SEED_STRIDE * iteration) % 2**31
        dataloader.worker_init_fn = partial(init.func, *init.args, **{**init.keywords, "seed": seed})
