"""Training on a GPU leaves the cores to the data workers."""

import pytest
import torch

from visdet.engine.process.threads import one_thread_beside_a_gpu


@pytest.mark.parametrize(
    ("kind", "asked", "expected"), [("cuda", None, 1), ("cuda", "3", 3), ("cpu", None, 3)]
)
def test_a_gpu_trains_beside_one_thread(kind, asked, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread_beside_a_gpu(torch.device(kind)):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
