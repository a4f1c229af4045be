"""The padded ground truth of a batch, and what is assigned of it."""

import pytest
import torch

from visdet.models.sparsedrive.base_target import PaddedInstances, PairCosts, assigned_instances, padded_rows


def instances(counts, device="cpu"):
    rows = [torch.arange(1.0, 1 + 2 * count).view(count, 2) for count in counts]
    labels = [torch.full((count,), 3) for count in counts]
    return PaddedInstances.of(labels, rows, [torch.ones_like(row) for row in rows], torch.device(device))


@pytest.mark.parametrize(("count", "room"), [(0, 16), (1, 16), (16, 16), (17, 32), (100, 128)])
def test_elsewhere_than_on_the_cpu_there_are_few_lengths(count, room):
    assert instances([count, 0], "meta").values.shape == (2, room, 2)
    assert padded_rows([torch.zeros(count, 3, 5)], torch.device("cpu")).shape == (1, count, 3, 5)


def test_an_assignment_counts_what_it_has_matched():
    truth = instances([2, 0])
    # One layer, two samples, two rows of instances, three predictions.
    costs = torch.tensor([[[[5.0, 1.0, 9.0], [1.0, 2.0, 9.0]], [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]])
    pairs = PairCosts(costs.double(), num_denoising=torch.tensor([7.0, 0.0]))
    found = assigned_instances({"det": pairs}, {"det": truth})["det"]
    assert found.index.tolist() == [[[1, 0, 2], [2, 2, 2]]]
    assert found.num_positive.tolist() == [2, 7, 1]  # at least 1, by which losses are divided
