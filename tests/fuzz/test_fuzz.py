"""The fuzzer finds what is planted, says how to repeat it, and draws what it says."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fuzz.check import run_call
from tests.fuzz.operators import OPERATORS
from tests.fuzz.problem import Draw

ROOT = Path(__file__).resolve().parents[2]

# A script that registers an operator, which misbehaves at a certain size, and runs the fuzzer on it. The processes of
# the fuzzer import it for the operator.
PLANTED = """
import os, sys, time
import torch
from tests.fuzz.operators import OPERATORS
from tests.fuzz.problem import Operator, Problem
from tests.fuzz.__main__ import main

def draw(draw):
    size = draw.random.randrange(100)
    return Problem({{"x": draw.place(draw.uniform(1, 2, size))}}, ("x",))

def doubled(x):
    if len(x) == 77:
        {body}
    return x * 2

OPERATORS["planted"] = Operator("planted", doubled, draw, lambda x: x * 2)
if __name__ == "__main__":
    sys.exit(main(["planted", "--calls", "400", "--seed", "0", "--batch", "100", "--jobs", "1", {more}]))
"""


@pytest.fixture
def run_planted(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "planted.py"

    def run(body, *more):
        script.write_text(PLANTED.format(body=body, more=", ".join(map(repr, more))))
        return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)

    return run


def seeds_of_77(calls):
    return [seed for seed in range(calls) if Draw("planted", seed, "cpu").random.randrange(100) == 77]


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        ("return torch.cat([x[:50] * 2, x[50:51] * 2.01, x[51:] * 2])", "wrong number", "1 of 77 entries"),
        ("return x.detach() * 2 + (x - x.detach()) * 2.1", "wrong number", "gradient of x"),
        ("os.abort()", "crash", "abort"),
        ("import ctypes; ctypes.string_at(0)", "crash", "segmentation fault"),
        ("raise RuntimeError('out of range')", "unclear error", "out of range"),
    ],
    ids=["wrong-element", "wrong-gradient", "abort", "segmentation-fault", "unclear-error"],
)
def test_a_planted_failure_is_found_and_can_be_repeated(run_planted, body, kind, said):
    result = run_planted(body, "--keep-going")
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"FAILURE ({kind}) of planted" in result.stdout
    assert said in result.stdout
    repeated = re.findall(r"repeat: python -m tests.fuzz planted --device cpu --seed (\d+)\n", result.stdout)
    seeds = seeds_of_77(400)
    assert len(repeated) > 1
    assert {int(seed) for seed in repeated} <= set(seeds)
    found = re.search(r"400 calls in \d+ s, .*; (\d+) failures", result.stdout)
    assert found
    assert len(repeated) <= int(found[1]) <= len(seeds)  # some calls ask for no gradient


def test_without_keep_going_the_first_failure_ends_it(run_planted):
    result = run_planted("os.abort()")
    assert result.returncode == 1
    assert result.stdout.count("FAILURE") == 1


def test_a_hang_is_a_failure(run_planted):
    result = run_planted("time.sleep(600)", "--limit", "2")
    assert result.returncode == 1
    assert "FAILURE (hang) of planted: no end within 2 s" in result.stdout
    assert "doubled" in result.stdout  # where it hung


def test_a_crash_that_needs_the_calls_before_it_is_repeated_with_them(run_planted):
    body = "globals().setdefault('met', []).append(1); len(met) > 1 and os.abort(); return x * 2"
    result = run_planted(body)
    _, second = next(
        pair for pair in itertools.pairwise(seeds_of_77(400)) if pair[0] // 100 == pair[1] // 100
    )
    assert result.returncode == 1
    assert f"--seed {second}\n" in result.stdout
    assert "it needs the calls before it" in result.stdout


def test_a_seed_is_the_same_problem_every_time():
    for name, operator in OPERATORS.items():
        one, other = (operator.draw(Draw(name, 5, "cpu")).arguments for _ in range(2))
        for key, value in one.items():
            if isinstance(value, torch.Tensor):
                assert value.stride() == other[key].stride()
                assert torch.equal(value.nan_to_num(), other[key].nan_to_num()), (name, key)


def test_problems_have_every_layout_type_and_bad_number():
    seen = set()
    for seed in range(300):
        value = OPERATORS["sample_sum"].draw(Draw("sample_sum", seed, "cpu")).arguments["images"]
        seen |= {value.dtype, "empty"} if value.numel() == 0 else {value.dtype}
        seen |= {"offset"} if value.storage_offset() % 4 else set()
        seen |= {"strides"} if not value.is_contiguous() else set()
        seen |= {"expanded"} if 0 in value.stride() and value.numel() else set()
        seen |= {"nan"} if value.isnan().any() else set()
        seen |= {"inf"} if value.isinf().any() else set()
    assert seen >= {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *("empty", "offset", "strides", "expanded", "nan", "inf"),
    }


def test_calls_run_in_this_process_for_a_sanitizer():
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "sample_sum",
        "--in-process",
        "--calls",
        "5",
        "--seed",
        "3",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 calls" in result.stdout


def test_an_argument_spoiled_on_purpose_is_refused_by_name():
    operator = OPERATORS["ms_deform_attn"]
    outcomes = [run_call(operator, seed, "cpu").kind for seed in range(60)]
    assert "refused" in outcomes
