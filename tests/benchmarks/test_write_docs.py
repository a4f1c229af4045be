"""The pages of docs/kernels: their figures are the committed ones, they stay short, and what they name exists."""

import re

import pytest
import torch
from json_files import write_json
from programs import ROOT

from benchmarks.ops.ms_deform_attn import CASES as ATTENTION
from benchmarks.paths import FOLDERS, measure_paths, paths_of
from benchmarks.write_docs import BLOCK, PAGES, rendered, write_docs
from visdet.ops import _library

DOCUMENTS = sorted(PAGES.glob("*.md"))
CSRC = ROOT / "visdet" / "ops" / "csrc"
SOURCES = "\n".join(
    path.read_text() for path in CSRC.rglob("*") if path.suffix in (".cpp", ".cu", ".cuh", ".h")
)
pages = pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)


@pages
def test_figures_are_the_committed_ones(page):
    text = page.read_text()
    assert text == rendered(text), "run: python -m benchmarks.write_docs"
    begins, ends = (
        re.findall(f"^{line}", text, re.MULTILINE) for line in ("<!-- figures: .* -->$", "<!-- end -->$")
    )
    assert len(begins) == len(BLOCK.findall(text)) == len(ends)


@pages
def test_links_files_and_kernels_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for name in re.findall(r"`((?:visdet|benchmarks|tests|docs|csrc|tools)/[\w./-]+)`", text):
        assert (ROOT / name).exists() or (CSRC.parent / name).exists(), name
    for kernel in re.findall(r"`(\w+_kernel)`", text):
        assert re.search(rf"\b{kernel}\b", SOURCES), kernel


def test_links_to_the_pages_exist():
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([\w./]*kernels[\w./]*)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_snippet_of_the_first_page_runs(stdout):
    if not _library.is_loaded("cuda"):
        pytest.skip("the CUDA library, which makes the plans, is not built")
    [snippet] = re.findall(r"```python\n(.*?)```", (PAGES / "README.md").read_text(), re.DOTALL)
    exec(compile(snippet, "docs/kernels/README.md", "exec"), {})
    assert "ms_deform_attn: path 'decoder'" in stdout()


def times_report(median, environment=None):
    result = {
        "op": "window_sum",
        "case": "small",
        "sizes": "B2 Q3",
        "dtype": "float32",
        "passes": {
            "forward": {"time": {"median_us": median}, "floor_us": 5.0},
            "backward": {"time": {"median_us": 15 * median}, "floor_us": 5.0},
            "both": {"time": {"median_us": 20 * median}, "floor_us": 5.0},
        },
        "peers": {"torch": {"times_slower": {"forward": 3.14159, "both": 2.0}}, "absent": {"problem": "no"}},
    }
    environment = environment or {"device": "NVIDIA H200", "driver": "580", "date": "today", "load": "1"}
    return {
        "environment": environment,
        "command": "python -m benchmarks.run --out /some/where --write-docs --device cuda",
        "results": [result, {**result, "case": "tiny"}],
    }


def paths_report():
    row = {"op": "window_sum", "case": "small", "sizes": "B2 Q3", "dtype": "float32"}
    rows = [
        row | {"pass": "forward", "path": "slow", "chosen": False, "us": 40.0},
        row | {"pass": "forward", "path": "plain", "chosen": False, "us": 12.5},
        row | {"pass": "forward", "path": "fast", "chosen": True, "us": 10.04},
        row | {"pass": "deterministic", "path": "plain", "chosen": False, "us": 1.0},
        row | {"pass": "backward", "path": "plain", "chosen": True, "us": 2000.4},
        row | {"case": "large", "pass": "forward", "path": "fast", "chosen": True, "us": 20.0},
        row | {"case": "large", "pass": "forward", "path": "plain", "chosen": False, "us": 18.0},
    ]
    return {"environment": {"device": "NVIDIA H200", "driver": "580", "date": "today"}, "rows": rows}


def test_reports_become_tables(tmp_path):
    page = tmp_path / "window_sum.md"
    page.write_text(
        "Before.\n<!-- figures: h200 times window_sum other_op -->\n<!-- end -->\nBetween.\n"
        "<!-- figures: h200 path-gains window_sum -->\nold\n<!-- end -->\nAfter.\n"
    )
    for name, report in (("bench", times_report(10.0)), ("paths", paths_report())):
        write_json(tmp_path / f"{name}.report", report)
    write_docs([tmp_path / "bench.report", tmp_path / "paths.report"], tmp_path)
    text = page.read_text()
    assert (
        text.startswith("Before.\n")
        and "\nBetween.\n" in text
        and text.endswith("\nAfter.\n")
        and "old" not in text
    )
    assert "Medians in µs: NVIDIA H200, driver 580, today; `python -m benchmarks.run --device cuda`." in text
    assert "| small | float32 | 10/5 | 200 | 3.14x/2x |" in text
    assert "tiny" not in text and "No figures of `other_op` are committed yet." in text
    assert "| forward | `fast` | 2 | 1 | 25 % (small, float32) | -10 % (large, float32) |" in text
    assert "| backward | `plain` | 1 | no other path |  |  |" in text
    assert "deterministic" not in text
    assert "Cases: `small` B2 Q3." in text
    assert rendered(text, tmp_path) == text
    assert rendered(text.replace("25 %", "35 %"), tmp_path) == text


@pytest.mark.parametrize("op", FOLDERS)
def test_every_path_is_told_of_on_its_page(op):
    text = (PAGES / f"{FOLDERS[op]}.md").read_text()
    for path in (*paths_of(op), *paths_of(f"{op}_backward")):
        assert f"`{path}`" in BLOCK.sub("", text), path


@pytest.mark.cuda
def test_every_path_that_serves_a_case_is_timed_once():
    case = next(case for case in ATTENTION if case.name == "tiny")
    rows = measure_paths(case, torch.float32, seconds=0.001)
    assert {row["pass"] for row in rows} >= {"forward", "backward"}
    for kind in {row["pass"] for row in rows}:
        of_pass = [row for row in rows if row["pass"] == kind]
        assert [row["chosen"] for row in of_pass].count(True) == 1
        assert len({row["path"] for row in of_pass}) == len(of_pass)
        assert all(row["us"] > 0 for row in of_pass)
