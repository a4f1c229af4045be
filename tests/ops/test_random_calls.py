"""Random calls of every operator give what its reference gives, and neither crash nor hang: docs/fuzzing.md."""

import time
from itertools import islice

import pytest

from tests.fuzz.operators import OPERATORS
from tests.fuzz.problem import Draw
from tests.fuzz.processes import run_batches

KINDS = (
    lambda draw: True,
    lambda draw: draw.has_bad_numbers,
    lambda draw: draw.has_empty_sizes,
)


@pytest.mark.parametrize("name", OPERATORS)
def test_random_calls(name, device, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    draws = {seed: Draw(name, seed, device) for seed in range(100, 1500)}
    seeds = sorted(
        {seed for has in KINDS for seed in islice((s for s, draw in draws.items() if has(draw)), 25)}
    )
    settings = dict(jobs=1, batch_size=len(seeds), limit_s=60, until=time.monotonic() + 250)
    outcomes = dict(run_batches(name, seeds, device, **settings))
    assert {seed: outcome.message for seed, outcome in outcomes.items() if outcome.is_failure} == {}
    assert sorted(outcomes) == seeds
