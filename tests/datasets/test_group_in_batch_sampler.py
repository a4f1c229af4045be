"""Batches that play sequences: every slot its own, whatever the number of ranks, from any position again."""

from itertools import chain, islice, pairwise

import numpy as np
import pytest
import torch
from mmengine.dataset import DefaultSampler

from visdet.datasets.samplers import GroupInBatchSampler, SceneSampler
from visdet.engine.data.resumable_batches import ResumableBatches

LENGTHS = [3, 5, 4, 2, 6, 3]


class Sequences(torch.utils.data.Dataset):
    keep_consistent_seq_aug = True

    def __init__(self, lengths=LENGTHS):
        self.flag = np.repeat(np.arange(len(lengths)), lengths)
        self.scene_starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])

    def __len__(self):
        return len(self.flag)

    def __getitem__(self, index):
        return index["idx"] if isinstance(index, dict) else index

    def get_augmentation(self, rng=None):
        return {"rotate": rng.random()}


def first(count, **arguments):
    arguments = dict(dataset=Sequences(), batch_size=2, seed=3) | arguments
    return list(islice(GroupInBatchSampler(**arguments), count))


def played(batches, slot, flag):
    """Return the runs of equal sequence numbers that a slot plays, with their frames."""
    runs = []
    for batch in batches:
        frame = batch[slot]["idx"]
        number = int(flag[frame])
        last, frames = runs[-1] if runs else (None, [])
        if last != number or frame <= frames[-1]:
            frames = []
            runs.append((number, frames))
        frames.append(frame)
    return runs


def test_every_sequence_is_played_once_a_round_and_never_twice_at_once():
    data = Sequences()
    batches = first(300)
    order = [[number for number, _ in played(batches, slot, data.flag)] for slot in range(2)]
    dealt = [order[k % 2][k // 2] for k in range(2 * min(map(len, order)))]
    for start in range(0, len(dealt) - 6, 6):
        assert sorted(dealt[start : start + 6]) == list(range(6))
    assert dealt[:6] != dealt[6:12]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_together_play_what_one_rank_would(world_size):
    alone = first(50, batch_size=6)
    size = 6 // world_size
    ranks = [first(50, batch_size=size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert alone == [list(chain(*parts)) for parts in zip(*ranks, strict=True)]


def test_seed_and_restart():
    assert first(30) == first(30)
    assert first(30) != first(30, seed=4)
    sampler = GroupInBatchSampler(dataset=Sequences(), batch_size=2, seed=3)
    assert list(islice(sampler, 30)) == list(islice(sampler, 30))
    inner = DefaultSampler(Sequences(), shuffle=False, seed=3)
    assert list(islice(GroupInBatchSampler(inner, 2), 30)) == first(30)


def test_a_resumed_run_continues():
    batches = ResumableBatches(GroupInBatchSampler(dataset=Sequences(), batch_size=2, seed=3), endless=True)
    batches.start_at(seed=0, iteration=17, skipped=17)
    assert list(islice(batches, 10)) == first(27)[17:]


def test_augmentation_is_the_sequences_or_the_frames():
    data = Sequences()
    for batch, after in pairwise(first(60)):
        for here, there in zip(batch, after, strict=True):
            same = data.flag[here["idx"]] == data.flag[there["idx"]] and there["idx"] == here["idx"] + 1
            assert (here["aug_config"] == there["aug_config"]) == bool(same)
    data.keep_consistent_seq_aug = False
    values = [item["aug_config"]["rotate"] for batch in first(30, dataset=data) for item in batch]
    assert len(set(values)) == 60


def test_skipping_and_backwards():
    data = Sequences()
    backwards = first(40, sequence_flip_prob=1.0)
    for slot in range(2):
        frames = [batch[slot]["idx"] for batch in backwards]
        steps = [b - a for a, b in pairwise(frames) if data.flag[a] == data.flag[b]]
        assert steps.count(-1) > len(steps) * 0.8
    skipped = first(2000, skip_prob=0.5)
    last = {int(np.flatnonzero(data.flag == number)[-1]) for number in range(6)}
    shown = np.bincount([item["idx"] for batch in skipped for item in batch], minlength=len(data))
    ordinary = [frame for frame in range(len(data)) if frame not in last]
    assert abs(shown[ordinary].mean() / shown[list(last)].mean() - 0.5) < 0.1


def test_scene_sampler(monkeypatch):
    import visdet.datasets.samplers.group_in_batch_sampler as module

    data = Sequences()
    assert list(SceneSampler(data)) == list(range(len(data))) and len(SceneSampler(data)) == len(data)
    parts = []
    for rank in range(3):
        monkeypatch.setattr(module, "get_dist_info", lambda rank=rank: (rank, 3))
        part = list(SceneSampler(data))
        assert part == sorted(part) and len(part) > 0
        # Whole scenes.
        assert all((np.isin(np.flatnonzero(data.flag == data.flag[frame]), part)).all() for frame in part)
        parts += part
    assert parts == list(range(len(data)))
