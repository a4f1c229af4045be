"""The notebook of docs holds its outputs, and runs from its first cell to its last in an empty folder."""

import json
from pathlib import Path

import pytest
from PIL import Image

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "first_steps.ipynb"
QUICK = """
loader = dict(batch_size=4, dataset=dict(generator=dict(num_train=32, num_val=8, image_size=64)))
changes = {f"{split}_dataloader": loader for split in ("train", "val", "test")}
changes["train_cfg"] = dict(max_iters=12, val_interval=12, val_begin=1)
"""


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("changes = {}\n", QUICK)
            exec(compile(source, f"{NOTEBOOK.name}, {cell['id']}", "exec"), names)
    assert names["result"].last_checkpoint.endswith("iter_12.pth") and len(names["files"]) == 8
    written = {path.name for path in (tmp_path / "work_dirs" / "first").iterdir()}
    assert {"coco_precision_recall.png", "coco_confusion_matrix.png", "drawn.png", "out.mp4"} <= written
    with Image.open("work_dirs/first/drawn.png") as drawn:
        assert drawn.size == (512, 512)
    outputs = str([cell.get("outputs") for cell in cells])
    assert "coco/bbox_mAP 0.68" in outputs and "image/png" in outputs
    assert all(cell["outputs"] for cell in cells[3:-1] if cell["cell_type"] == "code" and cell["id"] != "c1")
