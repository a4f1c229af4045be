"""The notebook of docs runs from its first cell to its last in an empty folder."""

import json
from pathlib import Path

import pytest
from PIL import Image

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "first_steps.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs"), "the notebook is kept without outputs"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, {cell['id']}", "exec"), names)
    assert names["result"].last_checkpoint.endswith("iter_12.pth") and len(names["files"]) == 8
    written = {path.name for path in (tmp_path / "work_dirs" / "first").iterdir()}
    assert {"coco_precision_recall.png", "coco_confusion_matrix.png", "drawn.png", "out.mp4"} <= written
    with Image.open("work_dirs/first/drawn.png") as drawn:
        assert drawn.size == (512, 512)
