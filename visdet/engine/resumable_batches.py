"""Batches of indices that can start in the middle, so that a resumed run loads no image twice."""

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_rank
from torch.utils.data import DataLoader, get_worker_info

from visdet.errors import InvalidInputError

__all__ = ["ResumableBatches", "SeededBatch"]


class SeededBatch(list):
    """The indices of a batch; a data worker that goes through them first seeds its random generators.

    What a worker draws for a batch then depends on the batch alone, and not on the batches that the worker has read
    before: a run that was killed draws the same numbers again when it is resumed. In the training process, where a
    loader without workers reads, nothing is seeded: a checkpoint holds that state.

    Args:
        indices: what the data set is asked for.
        key: numbers that no other batch of the run has.
    """

    def __init__(self, indices: Iterable[Any] = (), key: tuple[int, ...] = ()) -> None:
        super().__init__(indices)
        self.key = key

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            first, second = np.random.SeedSequence(self.key).generate_state(2)
            random.seed(int(first))
            np.random.seed(first)  # noqa: NPY002 (transforms may use it)
            torch.default_generator.manual_seed((int(first) << 32) + int(second))
        return super().__iter__()


class ResumableBatches:
    """The index batches of a batch sampler, which can begin in the middle of it.

    Skipping costs index arithmetic only: no image of a skipped batch is read.

    Args:
        batch_sampler: any sampler of index lists.
        endless: go on with the next epoch (``sampler.set_epoch``) where an epoch ends, for iteration-based
            training; the loader's workers then live as long as the run.

    Raises:
        ValueError: an endless sampler has an epoch without a batch.
    """

    def __init__(self, batch_sampler: Any, endless: bool) -> None:
        self.batch_sampler = batch_sampler
        self.endless = endless
        self._key = (0, 0)
        self._iteration = 0
        self._skipped = 0

    @classmethod
    def install(cls, dataloader: DataLoader, endless: bool) -> DataLoader:
        """Return a loader like ``dataloader`` that reads resumable batches of the same batch sampler.

        Raises:
            ValueError: the loader has no batch sampler (an iterable data set, or batch_size=None).
        """
        if dataloader.batch_sampler is None:
            raise InvalidInputError(
                "train_dataloader must give batches of indices of a map-style data set, got "
                f"{type(dataloader.dataset).__name__} without a batch sampler"
            )
        return DataLoader(
            dataloader.dataset,
            batch_sampler=cls(dataloader.batch_sampler, endless),
            num_workers=dataloader.num_workers,
            collate_fn=dataloader.collate_fn,
            pin_memory=dataloader.pin_memory,
            timeout=dataloader.timeout,
            worker_init_fn=dataloader.worker_init_fn,
            multiprocessing_context=dataloader.multiprocessing_context,
            # Starting the workers draws from this generator, and not from the one whose state a checkpoint holds.
            generator=torch.Generator(),
            prefetch_factor=dataloader.prefetch_factor,
            persistent_workers=dataloader.persistent_workers,
        )

    @property
    def sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def batch_size(self) -> int:
        return self.batch_sampler.batch_size

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def start_at(self, seed: int, iteration: int, skipped: int) -> None:
        """Set where the next pass over the batches begins.

        Args:
            seed: of the run, for what workers draw.
            iteration: of the run, that the first batch is for.
            skipped: batches of the sampler that come before it.
        """
        self._key, self._iteration, self._skipped = (seed, get_rank()), iteration, skipped

    def __iter__(self) -> Iterator[SeededBatch]:
        # A generator, so that this runs at the first batch: DataLoader calls iter() more often than it
        # iterates.
        batches = self._epoch_after_epoch() if self.endless else iter(self.batch_sampler)
        for iteration, batch in enumerate(itertools.islice(batches, self._skipped, None), self._iteration):
            yield SeededBatch(batch, (*self._key, iteration))

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
