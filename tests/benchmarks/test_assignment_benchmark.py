"""The benchmark of assignments times problems that have a solution."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are not installed

from benchmarks.linear_sum_assignment import CASES, costs_of, main
from visdet.models.matching.assignment import solve_padded


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("hard", [False, True])
def test_every_target_gets_a_query(case, hard):
    costs, counts = costs_of(case, hard)
    index = solve_padded(costs, counts.tolist())
    assert ((index < costs.shape[-2]).sum(-1) == counts).all()


@pytest.mark.cuda
def test_it_runs_on_a_gpu(capsys):
    assert main([]) == 0 and "SparseDrive, lines, random: " in capsys.readouterr().out
