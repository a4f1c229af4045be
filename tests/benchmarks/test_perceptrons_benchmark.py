"""The benchmark of perceptrons times calls that compute the same."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are not installed

from benchmarks.perceptrons import CASES, calls, main


@pytest.mark.parametrize("case", CASES)
def test_both_implementations_compute_the_same(case):
    timed = calls(case, 7, "cpu")
    torch.testing.assert_close(timed["ours", "forward"](), timed["torch", "forward"]())
    ours, theirs = timed["ours", "both"](), timed["torch", "both"]()
    assert len(ours) == len(theirs) > 4
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.cuda
def test_it_runs_on_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.perceptrons.ROWS", [5])
    assert main([]) == 0 and "class logits, 5 rows: ours forward" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 1 and "needs a GPU" in capsys.readouterr().err
