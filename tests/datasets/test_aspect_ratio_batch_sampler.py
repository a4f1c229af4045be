"""AspectRatioBatchSampler: what is in a batch, and how many there are."""

from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.dataset import DefaultSampler

from visdet.datasets.samplers import AspectRatioBatchSampler


class Sizes:
    """A data set that knows its images' sizes."""

    def __init__(self, upright):
        self.upright = upright

    def __len__(self):
        return len(self.upright)

    def get_data_info(self, index):
        return dict(width=3, height=4) if self.upright[index] else dict(width=4, height=4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 7), st.booleans())
def test_an_epoch(upright, batch_size, drop_last):
    sampler = DefaultSampler(Sizes(upright), shuffle=True, seed=0)
    batches = AspectRatioBatchSampler(sampler, batch_size, drop_last)
    epoch = list(batches)
    assert len(epoch) == len(batches)
    assert len(epoch) == (len(upright) // batch_size if drop_last else -(-len(upright) // batch_size))
    indices = [index for batch in epoch for index in batch]
    assert len(set(indices)) == len(indices)
    assert all(len(batch) == batch_size for batch in epoch[: None if drop_last else -1])
    assert drop_last or sorted(indices) == list(range(len(upright)))
    mixed = [batch for batch in epoch if len({upright[index] for index in batch}) > 1]
    assert len(mixed) <= 1  # made of what both kinds left over


def test_the_order_of_the_sampler_is_kept_and_nothing_carries_over():
    upright = [True, False, True, False, True]
    batches = AspectRatioBatchSampler(DefaultSampler(Sizes(upright), shuffle=False), 2)
    expected = [[0, 2], [1, 3], [4]]
    assert list(batches) == expected
    next(iter(batches))  # an epoch given up halfway
    assert list(batches) == expected
