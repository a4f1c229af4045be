"""The benchmark harness: a tiny case from end to end on the CPU, the gate, and every count by hand."""

import dataclasses

import pytest
import torch
from disk import names_in
from json_files import read_json
from programs import run_python

from benchmarks.case import Call, Peer, Work
from benchmarks.floors import Floors
from benchmarks.measure import measure
from benchmarks.ops.ms_deform_attn import (
    CASES,
    work_of,
)
from benchmarks.run import all_cases, main, run, select
from benchmarks.write_docs import time_row, times_table
from visdet.ops import ms_deform_attn

CPU = torch.device("cpu")
TINY = next(case for case in CASES if case.name == "tiny")
FLOORS = Floors(source="made up", copy=1e10)


def scaled(factor):
    """Return the operator with every output off by ``factor``."""
    return lambda *arguments: ms_deform_attn(*arguments) * factor


def test_tiny_case_from_end_to_end(tmp_path, stdout):
    options = ["--device", "cpu", "--cases", "attn/tiny", "--dtypes", "float32", "bfloat16", "--quick"]
    assert main([*options, "--out", str(tmp_path)]) == 0
    report = read_json(tmp_path / "bench.json")
    assert {"device", "threads", "torch", "CUDA of torch", "commit"} <= report["environment"].keys()
    assert [result["dtype"] for result in report["results"]] == ["float32", "bfloat16"]
    for result in report["results"]:
        assert result["gate"]["passed"]
        assert result["gate"]["errors"].keys() == {"output", "value", "locations", "weights"}
        assert list(result["passes"]) == ["forward", "backward", "both", "backward_deterministic"]
        for figures in result["passes"].values():
            time = figures["time"]
            assert 0 < time["low_us"] <= time["median_us"] <= time["high_us"]
            assert figures["percent_of_floor"] == pytest.approx(100 * figures["floor_us"] / time["median_us"])
        assert result["peers"]["torch"]["passes"].keys() == {"forward", "backward", "both"}
        assert result["peers"]["torch"]["output_error"] < 5e-3
    text = stdout()
    assert "| case | type | forward | forward and backward | torch |" in text
    assert "| ms_deform_attn/tiny | bfloat16 |" in text


def test_runs_without_mmengine(tmp_path):
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('mmengine', 'torchvision', 'mmcv'):\n"
        "            raise ImportError(f'{name} must not be needed')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from benchmarks.run import main\n"
        f"sys.exit(main(['--device', 'cpu', '--cases', 'tiny', '--quick', '--out', {str(tmp_path)!r}]))\n"
    )
    run_python("-c", code)
    assert names_in(tmp_path) == ["bench.json"]


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_gate_sees_what_is_not_finite(factor):
    result = measure(
        dataclasses.replace(TINY, function=scaled(factor)), torch.float32, CPU, FLOORS, quick=True
    )
    assert not result["gate"]["passed"] and result["gate"]["errors"]["output"] == float("inf")


def test_gate_compares_the_chosen_batches_of_the_full_call():
    def wrong_in_last(*arguments):
        return ms_deform_attn(*arguments) * torch.tensor([1.0, 1.1])[:, None, None]

    def passed(function, batches):
        case = dataclasses.replace(TINY, function=function, checked_batches=batches, peers=())
        return measure(case, torch.float32, CPU, FLOORS, quick=True)["gate"]["passed"]

    assert passed(ms_deform_attn, (1,)) and passed(ms_deform_attn, (0, 1))
    assert not passed(wrong_in_last, (1,)) and not passed(wrong_in_last, (0, 1))
    assert passed(wrong_in_last, (0,))


def test_peers_missing_and_failing():
    def missing():
        raise ImportError("not installed")

    def failing():
        def call(*_):
            raise ValueError("only on Tuesdays")

        return lambda *arguments: Call(call, arguments, (0, 3, 4))

    def doubled():
        return lambda *arguments: Call(scaled(2), arguments, (0, 3, 4))

    peers = (
        Peer("doubled", doubled),
        Peer("missing", missing),
        Peer("failing", failing),
    )
    case = dataclasses.replace(TINY, peers=peers)
    result = measure(case, torch.float32, CPU, FLOORS, quick=True)
    assert result["gate"]["passed"] and result["peers"].keys() == {"doubled", "failing"}
    assert result["peers"]["doubled"]["output_error"] == pytest.approx(1)
    assert result["peers"]["failing"]["problem"] == "ValueError: only on Tuesdays"
    assert times_table([time_row(result)])[0].endswith("| doubled |")


def test_counts_of_one_sample_by_hand():
    # One sample of two channels on a 2 x 3 map: it reads 4 of 6 rows.
    sizes = dict(B=1, Q=1, G=1, C=2, P=1, levels=((2, 3),), local=True)
    assert work_of(torch.float32, **sizes) == {
        # 4 rows x 2 x 4 B, x y weight, an output of 2
        "forward": Work(moved=32 + 12 + 8, gathered=32, rows_footprint=48),
        # gradient of the output, the rows, locations and weights with their gradients, the gradient of value
        "backward": Work(
            moved=8 + 32 + 24 + 48,
            gathered=32 + 32,
            rows_footprint=48,
            reductions_footprint=48,
        ),
    }
    half = work_of(torch.bfloat16, **sizes)
    assert half["forward"].moved == 16 + 12 + 4 and half["forward"].gathered == 16
    assert half["backward"].moved == 4 + 16 + 24 + 24 and half["backward"].gathered == 16 + 32


def test_selection(capsys):
    cases = all_cases()
    titles = [case.title for case in cases]
    assert len(set(titles)) == len(titles) and {case.title for case in CASES} <= set(titles)
    heavy = [case for case in cases if case.heavy]
    assert heavy and not set(titles) - {case.title for case in select(cases, [], torch.device("cuda"))}
    assert not any(case.heavy for case in select(cases, [], CPU) + select(cases, ["ms_deform_attn"], CPU))
    assert heavy[0] in select(cases, [heavy[0].name], CPU)
    assert main(["--cases", "no-such-case"]) == 1
    assert "--list lists the cases" in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert "ms_deform_attn/decoder-q300: B2 Q300 G8 C32 L4 P4" in capsys.readouterr().out


@pytest.mark.cuda
def test_tiny_case_on_a_gpu_with_and_without_a_graph(tmp_path):
    graphed = dataclasses.replace(TINY, name="tiny-graph", graph=True)
    assert run([TINY, graphed], [torch.float32, torch.float16], torch.device("cuda"), tmp_path, quick=True)
    results = read_json(tmp_path / "bench.json")["results"]
    assert all(len(result["passes"]) == 5 and not result["failures"] for result in results)
    assert results[2]["passes"]["both"]["time"]["method"] == "CUDA graph"
