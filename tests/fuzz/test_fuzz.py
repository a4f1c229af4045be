"""The fuzzer finds what is planted, says how to repeat it, and draws what it says."""

import itertools
import re

import pytest
import torch
from programs import run_python

from tests.fuzz.__main__ import main
from tests.fuzz.check import run_call
from tests.fuzz.operators import OPERATORS
from tests.fuzz.problem import Draw

# Operators that misbehave at a certain size: what one does there, and the fuzzer's further arguments.
PLANTED = {
    "wrong_element": ("return torch.cat([x[:50] * 2, x[50:51] * 2.01, x[51:] * 2])", ["--keep-going"]),
    "wrong_gradient": ("return x.detach() * 2 + (x - x.detach()) * 2.1", ["--keep-going"]),
    "aborts": ("os.abort()", ["--keep-going"]),
    "segfaults": ("ctypes.string_at(0)", ["--keep-going"]),
    "unclear_error": ("raise RuntimeError('out of range')", ["--keep-going"]),
    "ends_it": ("os.abort()", []),
    "hangs": ("time.sleep(600)", ["--limit", "2"]),
    "aborts_at_the_second": ("met.append(1); len(met) > 1 and os.abort()", []),
}
# A script that registers them and runs the fuzzer on each. The processes of the fuzzer import it for the operators.
SCRIPT = """
import ctypes, os, time
import torch
from tests.fuzz.operators import OPERATORS
from tests.fuzz.problem import Operator, Problem
from tests.fuzz.__main__ import main

met = []

def draw(draw):
    size = draw.random.randrange(100)
    return Problem({"x": draw.place(draw.uniform(1, 2, size))}, ("x",))
"""
OPERATOR = """
def {name}(x):
    if len(x) == 77:
        {body}
    return x * 2

OPERATORS["{name}"] = Operator("{name}", {name}, draw, lambda x: x * 2)
"""
RUN = """
if __name__ == "__main__":
    for name, more in {runs}.items():
        options = ["--calls", "400", "--seed", "0", "--batch", "100", "--jobs", "1", *more]
        print("status", main([name, *options]), "of", name, flush=True)
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """What the fuzzer prints for each planted operator, and its exit status."""
    script = tmp_path_factory.mktemp("planted") / "planted.py"
    operators = [OPERATOR.format(name=name, body=body) for name, (body, _) in PLANTED.items()]
    runs = {name: more for name, (_, more) in PLANTED.items()}
    script.write_text("".join([SCRIPT, *operators, RUN.format(runs=runs)]))
    told, _ = run_python(script)
    parts = re.findall(r"(.*?)^status (\d) of (\w+)\n", told, re.DOTALL | re.MULTILINE)
    assert [name for *_, name in parts] == list(PLANTED), told
    return {name: (printed, int(status)) for printed, status, name in parts}


def seeds_of_77(name, calls):
    return [seed for seed in range(calls) if Draw(name, seed, "cpu").random.randrange(100) == 77]


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("wrong_element", "wrong number", "1 of 77 entries"),
        ("wrong_gradient", "wrong number", "gradient of x"),
        ("aborts", "crash", "abort"),
        ("segfaults", "crash", "segmentation fault"),
        ("unclear_error", "unclear error", "out of range"),
    ],
)
def test_a_planted_failure_is_found_and_can_be_repeated(planted, name, kind, said):
    printed, status = planted[name]
    assert status == 1, printed
    assert f"FAILURE ({kind}) of {name}" in printed
    assert said in printed
    repeated = re.findall(rf"repeat: python -m tests.fuzz {name} --device cpu --seed (\d+)\n", printed)
    seeds = seeds_of_77(name, 400)
    assert len(repeated) > 1
    assert {int(seed) for seed in repeated} <= set(seeds)
    found = re.search(r"400 calls in \d+ s, .*; (\d+) failures", printed)
    assert found
    assert len(repeated) <= int(found[1]) <= len(seeds)  # some calls ask for no gradient


def test_without_keep_going_the_first_failure_ends_it(planted):
    printed, status = planted["ends_it"]
    assert status == 1
    assert printed.count("FAILURE") == 1


def test_a_hang_is_a_failure(planted):
    printed, status = planted["hangs"]
    assert status == 1
    assert "FAILURE (hang) of hangs: no end within 2 s" in printed
    assert "planted.py" in printed  # where it hung


def test_a_crash_that_needs_the_calls_before_it_is_repeated_with_them(planted):
    name = "aborts_at_the_second"
    printed, status = planted[name]
    pairs = itertools.pairwise(seeds_of_77(name, 400))
    _, second = next(pair for pair in pairs if pair[0] // 100 == pair[1] // 100)
    assert status == 1
    assert f"--seed {second}\n" in printed
    assert "it needs the calls before it" in printed


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


def test_calls_run_in_this_process_for_a_sanitizer(stdout):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.fuzz.__main__.run_batches", None)
        assert main(["sample_sum", "--in-process", "--calls", "5", "--seed", "3"]) == 0
    assert "5 calls" in stdout()


def test_an_argument_spoiled_on_purpose_is_refused_by_name():
    operator = OPERATORS["ms_deform_attn"]
    assert "refused" in [run_call(operator, seed, "cpu").kind for seed in range(60)]
