"""The benchmark of whole models: every kind of case on the CPU with tiny models, and its report."""

import pytest

pytest.importorskip("mmengine")
from json_files import read_json

from benchmarks.models import CASES, main


@pytest.mark.parametrize("words", [["train B2", "predict B1"], ["stage1 train"]])
def test_tiny_models_on_the_cpu(words, tmp_path, capsys):
    assert (
        main(
            [
                "--device",
                "cpu",
                "--dtypes",
                "bfloat16",
                "--steps",
                "1",
                "--out",
                str(tmp_path),
                "--cases",
                *words,
            ]
        )
        == 0
    )
    report = read_json(tmp_path / "models.json")
    chosen = [case for case in CASES if any(word in case.name for word in words)]
    assert [result["case"] for result in report["results"]] == [case.name for case in chosen]
    assert all(result["wall_ms"] > 0 and result["pace_ms"] > 0 for result in report["results"])
    assert all(
        ("loss" in result) == case.trains for result, case in zip(report["results"], chosen, strict=True)
    )
    assert "torch" in report["environment"]
    text = (tmp_path / "models.md").read_text()
    assert all(f"| {case.name} | bfloat16 |" in text for case in chosen)
