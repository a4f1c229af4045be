"""The recipes of docs/recipes.md run."""

import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from json_files import read_json
from programs import ROOT

import visdet
from visdet.datasets import ShapesDataset, make_shapes
from visdet.engine import load_config, read_checkpoint

PAGE = (ROOT / "docs/recipes.md").read_text()
BLOCKS = [
    (heading, block)
    for heading, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
NEEDED = ("wandb", "mlflow", "trackers")
SMALL = {"encoder": {"num_layers": 1}, "decoder": {"num_layers": 1}, "backbone": {"base_channels": 8}}
SMALL |= {"neck": {"in_channels": [16, 32, 64]}}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    return make_shapes(folder / "data", num_train=4, num_val=2, image_size=64, num_workers=1)


def short_run(shapes, recipe):
    data = {"type": "CocoDataset", "metainfo": dict(ShapesDataset.METAINFO), "data_root": f"{shapes}/"}
    options = {
        f"{split}_dataloader": {"batch_size": 2, "dataset": data} for split in ("train", "val", "test")
    }
    evaluator = {"ann_file": f"{shapes}/annotations/instances_val.json"}
    options |= {"val_evaluator": evaluator, "test_evaluator": evaluator, "graph": False}
    options |= {"train_cfg": {"max_iters": 12, "val_interval": 1, "val_begin": 1}, "model": SMALL}
    cfg = load_config("deformable_detr/deformable-detr_shapes", options)[0]
    cfg.merge_from_dict(recipe)
    return cfg


def skip_without_packages(block):
    for package in NEEDED:
        if package in block.lower():
            pytest.importorskip(package)


@pytest.mark.parametrize(("heading", "block"), BLOCKS, ids=[heading for heading, _ in BLOCKS])
def test_a_recipe_runs(tmp_path, monkeypatch, stdout, shapes, heading, block):
    skip_without_packages(block)
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
    cfg = short_run(shapes, recipe)
    result = visdet.train(cfg, work_dir="work_dirs/run")
    checkpoint = read_checkpoint(result.last_checkpoint)
    if "EMA" in heading:
        assert checkpoint["ema_state_dict"]
    if "stopping" in heading:
        assert checkpoint["meta"]["iter"] < 12 and "EarlyStoppingHook" in stdout()
    if "accumulation" in heading:
        assert "4" in str(cfg.optim_wrapper.accumulative_counts)
    if "frozen" in heading:
        first, last = read_checkpoint(result.best_checkpoint)["state_dict"], checkpoint["state_dict"]
        changed = {key for key in first if not torch.equal(first[key], last[key])}
        assert changed and not any(key.startswith("backbone.") for key in changed)
    if "result files" in heading:
        assert isinstance(read_json("work_dirs/results/coco.bbox.json"), list)


STAND_INS = {"srun": 'exec "$@"', "scontrol": "echo localhost", "visdet": 'exec "$PYTHON" -m visdet "$@"'}
STAND_INS["torchrun"] = 'exec "$PYTHON" -m torch.distributed.run "$@"'


@pytest.mark.slow
@pytest.mark.parametrize("script", COMMANDS)
def test_a_command_runs(tmp_path, shapes, script):
    skip_without_packages(script)
    short_run(shapes, {}).dump(tmp_path / "my_config.py")
    for name, line in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "WANDB_MODE": "offline",
    }
    environment |= {
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "node",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    script = script.replace("node 8", "node 2").replace("29500", port)
    command, environment = ["bash", "-ec", script], {**os.environ, **environment}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("work_dirs/*/iter_12.pth"))
    if "--logger" in script:
        assert list(tmp_path.glob("**/*wandb*" if "wandb" in script else "mlflow.db"))
