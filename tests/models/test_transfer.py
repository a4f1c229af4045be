"""Copies between the host and the device."""

import pytest
import torch

from visdet.models.transfer import SamplesOnHost


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_samples_come_to_memory_of_their_own(device):
    boxes, ids = torch.arange(12.0, device=device).view(3, 4), torch.arange(3, device=device)
    is_kept = ids > 0
    arriving = SamplesOnHost({"boxes": boxes, "of_task": {"ids": ids, "is_kept": is_kept}})
    assert [sample["boxes"].shape for sample in arriving.samples] == [(4,)] * 3
    assert arriving.samples[0]["of_task"]["ids"].device.type == "cpu"
    arriving.wait()
    boxes.zero_()
    for index, sample in enumerate(arriving.samples):
        assert sample["boxes"].tolist() == [4 * index, 4 * index + 1, 4 * index + 2, 4 * index + 3]
        assert sample["of_task"]["ids"].item() == index
        assert sample["of_task"]["is_kept"].item() == (index > 0)
        assert sample["boxes"].untyped_storage().nbytes() == 16
    arriving.samples[0]["boxes"].fill_(-1)
    arriving.wait()  # has no effect any more
    assert arriving.samples[0]["boxes"].tolist() == [-1] * 4


def test_a_batch_may_be_empty():
    arriving = SamplesOnHost({"boxes": torch.zeros(0, 4)})
    arriving.wait()
    assert arriving.samples == []
