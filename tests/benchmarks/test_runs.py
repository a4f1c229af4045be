"""benchmarks.runs: every kind of run on the CPU, with small configs, from drawn files to the table."""

import pytest

pytest.importorskip("mmengine", reason="the extra train is not installed")

from json_files import read_json

from benchmarks import runs


@pytest.mark.parametrize("names", [["deformable_detr", "sparsedrive"], ["test", "video"]], ids="-".join)
def test_runs_from_drawn_files(names, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = ["--iterations", "4", "--batch-size", "1", "--sizes", "one", "--out", str(tmp_path)]
    assert runs.main([*options, "--runs", *names]) == 0
    results = read_json(tmp_path / "runs.json")["results"]
    assert [result["run"] for result in results] == names and all(result["ms"] > 0 for result in results)
    table = (tmp_path / "runs.md").read_text()
    assert all(
        f"| {result['run']} | one | float32 " in table and f" {result['ms']:.1f} " in table
        for result in results
    )


def test_the_sizes_are_shared_as_said(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "draw_photographs", lambda folder, sizes: drawn.extend(sizes) or [])
    for kind, shares in runs.SIZES.items():
        drawn = []
        runs.draw_coco(tmp_path, 2000, kind)
        for size, share in shares.items():
            assert drawn.count(size) / 2 == pytest.approx(share, abs=50), (kind, size)
        assert {640} & {side for size in drawn for side in size} or kind in ("panorama", "aerial")
