"""The recipes of docs/recipes.md run."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import visdet
from visdet.datasets import ShapesDataset, make_shapes
from visdet.engine import load_config, read_checkpoint

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "recipes.md").read_text()
BLOCKS = [
    (heading, block)
    for heading, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
NEEDED = {"WandbVisBackend": "wandb", "MLflowVisBackend": "mlflow", "import supervision": "supervision"}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    return make_shapes(folder / "data", num_train=4, num_val=2, image_size=64, num_workers=1)


def short_run(shapes, recipe):
    data = {
        "dataset": {
            "type": "CocoDataset",
            "metainfo": dict(ShapesDataset.METAINFO),
            "data_root": f"{shapes}/",
        }
    }
    options = {f"{split}_dataloader": {"batch_size": 2, **data} for split in ("train", "val", "test")}
    options |= {
        f"{split}_evaluator": {"ann_file": f"{shapes}/annotations/instances_val.json"}
        for split in ("val", "test")
    }
    options |= {"train_cfg": {"max_iters": 12, "val_interval": 1, "val_begin": 1}, "graph": False}
    cfg = load_config("deformable_detr/deformable-detr_shapes", options)[0]
    cfg.merge_from_dict(recipe)
    return cfg, visdet.train(cfg, work_dir="work_dirs/run")


@pytest.mark.parametrize(("heading", "block"), BLOCKS, ids=[heading for heading, _ in BLOCKS])
def test_a_recipe_runs(tmp_path, monkeypatch, capsys, shapes, heading, block):
    for text, package in NEEDED.items():
        if text in block and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    if block.startswith("# in Python"):
        detector = visdet.init_detector("deformable_detr/deformable-detr_shapes", device="cpu")
        images = [np.zeros((64, 64, 3), np.uint8)] * 2
        names = {"detector": lambda _: iter(detector(images))} if "mp4" in block else {"detector": detector}
        exec(block.replace('"street.jpg"', "__import__('numpy').zeros((64, 64, 3), 'uint8')"), names)
        assert "found" in names
        return
    recipe: dict = {}
    exec(block, recipe)
    del recipe["__builtins__"]
    cfg, result = short_run(shapes, recipe)
    checkpoint = read_checkpoint(result.last_checkpoint)
    if "EMA" in heading:
        assert checkpoint["ema_state_dict"]
    if "stopping" in heading:
        assert checkpoint["meta"]["iter"] < 12 and "EarlyStoppingHook" in capsys.readouterr().out
    if "accumulation" in heading:
        assert "4" in str(cfg.optim_wrapper.accumulative_counts)
    if "frozen" in heading:
        first, last = read_checkpoint(result.best_checkpoint)["state_dict"], checkpoint["state_dict"]
        changed = {key for key in first if not torch.equal(first[key], last[key])}
        assert changed and not any(key.startswith("backbone.") for key in changed)
    if "result files" in heading:
        assert isinstance(json.loads(Path("work_dirs/results/coco.bbox.json").read_text()), list)
