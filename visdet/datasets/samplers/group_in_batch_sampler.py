"""Samplers that give temporal models their frames in order."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

import numpy as np
from mmengine.dist import get_dist_info
from torch.utils.data import BatchSampler, Dataset, Sampler

from visdet.checks.arguments import Seed
from visdet.errors import InvalidInputError
from visdet.registry import DATA_SAMPLERS

from .process_share import process_share


@DATA_SAMPLERS.register_module()
class GroupInBatchSampler(BatchSampler):
    """Endless batches for temporal models. Slot b of a batch holds the next frame of the sequence that slot b plays.

    ``dataset.flag`` numbers the sequence of each frame. The slots of all ranks share one endless shuffled list of
    sequences. Of G slots in total, slot g takes the sequences at g, g + G, g + 2G and so on, so that every sequence is
    played once per round. A batch is a list of ``dict(idx, aug_config)``. With ``dataset.keep_consistent_seq_aug``, the
    augmentation is drawn once per sequence.

    Every ``iter()`` starts at the beginning, and the k-th batch depends on the seed, the rank and k alone. A resumed
    run can therefore skip the batches that it has trained on.

    Args:
        sampler: provides ``dataset`` and ``seed``. Its order is not used. mmengine passes it.
        batch_size: number of slots of this rank.
        dataset: the data set, if it is not that of ``sampler``.
        seed: seed of the random numbers. The default is the sampler's seed, or one that all ranks agree on.
        skip_prob: probability of leaving out a frame, as if the camera had a lower frame rate.
        sequence_flip_prob: probability of playing a sequence backwards.
        rank, world_size: those of the process group by default.
        drop_last: accepted because mmengine passes it, without effect.

    Raises:
        ValueError: the data set has no ``flag``, or it has fewer sequences than slots.

    Source: SparseDrive's GroupInBatchSampler, after SOLOFusion's. Differences: it is a batch sampler, all random
    numbers come from ``seed``, and it starts anew at every ``iter()``.
    """

    endless = True  # An epoch never ends.

    def __init__(
        self,
        sampler: Sampler | None = None,
        batch_size: int = 1,
        dataset: Dataset | None = None,
        seed: Seed | None = None,
        skip_prob: float = 0.0,
        sequence_flip_prob: float = 0.0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = True,
    ) -> None:
        self.sampler: Any = sampler
        self.dataset: Any = getattr(sampler, "dataset", None) if dataset is None else dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank, self.world_size, self.seed = process_share(sampler, rank, world_size, seed)
        self.skip_prob = skip_prob
        self.sequence_flip_prob = sequence_flip_prob
        flag = getattr(self.dataset, "flag", None)
        if flag is None:
            raise InvalidInputError(
                f"GroupInBatchSampler: {type(self.dataset).__name__} has no flag; set with_seq_flag=True"
            )
        self._frames_of_sequence = [np.flatnonzero(flag == number) for number in range(int(flag.max()) + 1)]
        num_slots = batch_size * self.world_size
        found = len(self._frames_of_sequence)
        if found < num_slots:
            raise InvalidInputError(
                f"GroupInBatchSampler: {num_slots} slots (batch_size {batch_size} x {self.world_size} ranks) need as "
                f"many sequences, got {found}; raise sequences_split_num or lower batch_size"
            )

    def __len__(self) -> int:
        """Return the number of batches that hold as many frames as the data set."""
        return max(1, len(self.dataset) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Any]:
        first = self.rank * self.batch_size
        slots = [self._play(slot) for slot in range(first, first + self.batch_size)]
        while True:
            yield [next(slot) for slot in slots]

    def _play(self, slot: int) -> Iterator[dict]:
        """Yield the frames of the sequences of a slot without end. Slots are numbered over all ranks."""
        rng = np.random.default_rng([self.seed, 1, slot])
        is_consistent = getattr(self.dataset, "keep_consistent_seq_aug", True)
        for sequence in islice(self._shuffled_sequences(), slot, None, self.batch_size * self.world_size):
            frames = self._frames_of_sequence[sequence]
            if rng.random() < self.sequence_flip_prob:
                frames = frames[::-1]
            augmentation = self._augmentation(rng)
            for position, frame in enumerate(frames):
                # The last frame is never skipped, so that every sequence has a frame.
                if self.skip_prob and position + 1 < len(frames) and rng.random() < self.skip_prob:
                    continue
                if not is_consistent:
                    augmentation = self._augmentation(rng)
                yield {"idx": int(frame), "aug_config": augmentation}

    def _augmentation(self, rng: np.random.Generator) -> dict | None:
        draw = getattr(self.dataset, "get_augmentation", None)
        return draw(rng) if draw is not None else None

    def _shuffled_sequences(self) -> Iterator[int]:
        """Yield all sequences in a random order, again and again. The orders are the same on all ranks."""
        rng = np.random.default_rng([self.seed, 0])
        while True:
            yield from rng.permutation(len(self._frames_of_sequence)).tolist()


@DATA_SAMPLERS.register_module()
class SceneSampler(Sampler[int]):
    """Yields every frame once, scene after scene. Each rank has scenes of its own.

    It is meant for the evaluation of temporal models, because mmengine's DefaultSampler distributes the frames of a
    scene over the ranks. Batches must have one frame, since each slot of a batch goes on with frames of its own. Ranks
    may have different numbers of frames, because the driving metrics gather results by token.

    Args:
        dataset: the data set. If it has no ``scene_starts``, it is taken as one scene.
        shuffle: must be ``False``. seed: accepted because mmengine passes it, without effect.

    Raises:
        ValueError: ``shuffle`` is True.
    """

    batches_have_one = True  # which the runner checks

    def __init__(self, dataset: Any, shuffle: Literal[False] = False, seed: int | None = None) -> None:
        self.dataset = dataset
        self.seed = seed
        rank, world_size = get_dist_info()
        starts = np.asarray(getattr(dataset, "scene_starts", [0]))
        bounds = np.append(starts, len(dataset))
        # The shares are contiguous and have about equal numbers of frames.
        share = np.minimum(starts * world_size // max(len(dataset), 1), world_size - 1)
        self._frames = np.flatnonzero(np.repeat(share, np.diff(bounds)) == rank)

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[int]:
        return iter(self._frames.tolist())

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, because every epoch is the same."""
