"""Batches of indices that can start at any batch, so that a resumed run does not load the skipped images."""

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from mmengine.dataset import InfiniteSampler
from mmengine.dist import get_rank
from torch.utils.data import DataLoader, get_worker_info

from visdet.errors import InvalidInputError

from ..process.random_state import preserved_cpu_state


class SeededBatch(list):
    """The indices of a batch. What iterates over them, to read the samples, seeds its random generators first.

    The random numbers that are drawn for a batch then depend on the batch alone, and not on who reads it, or has read
    before. They are the same with any number of workers, and when a run that was killed is resumed. A loader without
    workers reads in the training process, which goes on with the random state that it had before the batch.

    torch tells a worker nothing of a batch but its indices, so that their iteration is the only place for this. A data
    set could do it in ``__getitems__``, but the run's own data set would then have to be wrapped.

    Args:
        indices: the indices of the samples of the batch.
        key: numbers that identify the batch within the run and from which the seed is made.
    """

    def __init__(self, indices: Iterable[Any], key: tuple[int, ...]) -> None:
        super().__init__(list.__iter__(indices) if isinstance(indices, list) else indices)
        self.indices = indices
        self.key = key

    def __iter__(self) -> Iterator[Any]:
        with nullcontext() if get_worker_info() else preserved_cpu_state():
            first, second = np.random.SeedSequence(self.key).generate_state(2)
            random.seed(int(first))
            np.random.seed(first)  # noqa: NPY002 (transforms may use it)
            torch.default_generator.manual_seed((int(first) << 32) + int(second))
            yield from self.indices  # A planned batch gives each sample random numbers of its own.

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededBatch, (self.indices, self.key)


class ResumableBatches:
    """A batch sampler that yields the batches of another batch sampler, beginning with any of them.

    Only the indices of a skipped batch are drawn. Its images are not read.

    Args:
        batch_sampler: a sampler that yields lists of indices.
        endless: whether to continue with the next epoch (``sampler.set_epoch``) when an epoch ends. This is meant for
            iteration-based training, where the workers of the loader then live as long as the run.

    Raises:
        ValueError: ``endless`` is True and an epoch has no batch.
    """

    def __init__(self, batch_sampler: Any, endless: bool) -> None:
        self.batch_sampler = batch_sampler
        self.endless = endless
        self._key = (0, 0)
        self._iteration = 0
        self._skipped = 0

    @classmethod
    def install(cls, dataloader: DataLoader, endless: bool) -> DataLoader:
        """Let a loader that has read nothing yet read resumable batches of its batch sampler, and return it.

        Raises:
            ValueError: the loader has no batch sampler, because its data set is iterable or its batch_size is None.
        """
        if dataloader.batch_sampler is None:
            raise InvalidInputError(
                "train_dataloader must have a batch sampler and a map-style data set, got "
                f"{type(dataloader.dataset).__name__} without a batch sampler"
            )
        # torch refuses an assignment, so that a loader which is read keeps its batches.
        vars(dataloader)["batch_sampler"] = cls(dataloader.batch_sampler, endless)
        # Starting the workers draws from this generator instead of the global one, whose state a checkpoint holds.
        dataloader.generator = torch.Generator()
        return dataloader

    @property
    def sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", None)

    @property
    def endless_part(self) -> Any:
        """The batch sampler itself or its sampler, whichever gives indices without end, or None."""
        for part in (self.batch_sampler, self.sampler):
            if isinstance(part, InfiniteSampler) or getattr(part, "endless", False):
                return part
        return None

    @property
    def batch_size(self) -> int:
        return self.batch_sampler.batch_size

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def start_at(self, seed: int, iteration: int, skipped: int) -> None:
        """Choose the batch with which the next pass over the batches begins.

        Args:
            seed: the seed of the run, on which the random numbers of the workers depend.
            iteration: the iteration of the run that gets the first batch.
            skipped: the number of batches to skip.
        """
        self._key = (seed, get_rank())
        self._iteration = iteration
        self._skipped = skipped

    def __iter__(self) -> Iterator[SeededBatch]:
        # This is a generator, so that it runs only when the first batch is drawn. DataLoader calls iter() more often
        # than it iterates.
        batches = self._epoch_after_epoch() if self.endless else iter(self.batch_sampler)
        for iteration, batch in enumerate(itertools.islice(batches, self._skipped, None), self._iteration):
            yield SeededBatch(batch, (*self._key, iteration))

    def _epoch_after_epoch(self) -> Iterator[list[int]]:
        for epoch in itertools.count():
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            batch = None
            for batch in self.batch_sampler:
                yield batch
            if batch is None:
                raise InvalidInputError(
                    f"train_dataloader gives no batch: its data set has no samples from which "
                    f"{type(self.batch_sampler).__name__} could make a batch of {self.batch_size}"
                )
