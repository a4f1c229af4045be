"""What can be said about a launch before any process joins a group."""

import pytest
import torch

from visdet.engine import UserError, checked_launcher


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def test_torchrun_is_noticed(monkeypatch):
    assert checked_launcher(None) == "none" and checked_launcher("none") == "none"
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")
    assert checked_launcher(None) == "pytorch" and checked_launcher("pytorch") == "pytorch"
    assert checked_launcher("none") == "none"


def test_pytorch_without_torchrun():
    with pytest.raises(UserError, match="launcher must be 'none' or 'pytorch', got 'slurm'"):
        checked_launcher("slurm")
    with pytest.raises(UserError, match="--launcher pytorch needs torchrun: torchrun --nproc-per-node 2"):
        checked_launcher("pytorch")


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"process 2 .*--nproc-per-node 2"):
        checked_launcher("pytorch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checked_launcher("pytorch") == "pytorch"
