"""The page on trees: its commands and both of its configs, run as they stand there.

``make check-trees`` gets the photographs. On a CPU of two cores, it takes some 20 minutes.
"""

import os
import re
import subprocess
import sys

import pytest
import torch
from json_files import read_json
from programs import ROOT

PHOTOGRAPHS = os.environ.get("VISDET_TREES", "")

pytestmark = [
    pytest.mark.skipif(not PHOTOGRAPHS, reason="make check-trees downloads the photographs"),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the page's tiles and its two configs: the small one, and the same with the lines of DINO."""
    folder = tmp_path_factory.mktemp("trees")
    run(folder, str(ROOT / "tools" / "tree_tiles.py"), PHOTOGRAPHS, "data/trees")
    small, dino = re.findall(r"```python\n(.*?)```", (ROOT / "docs/real_photographs.md").read_text(), re.S)
    (folder / "my_trees.py").write_text(small)
    (folder / "dino.py").write_text(small + dino)
    return folder


def run(folder, *command):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# The iterations on a CPU, and the least mAP at IoU 0.5 after them and after the whole schedule on a GPU.
RUNS = {"my_trees": (600, 0.2, 0.3), "dino": (4, 0.0, 0.5)}


@pytest.mark.parametrize("name", RUNS)
def test_the_page_finds_trees(folder, name):
    iterations, on_cpu, on_gpu = RUNS[name]
    has_gpu = torch.cuda.is_available()
    options = (
        ["--amp"]
        if has_gpu
        else ["--cfg-options", f"train_cfg.max_iters={iterations}", "train_cfg.val_begin=1"]
    )
    run(folder, "-m", "visdet", "check-data", f"{name}.py")
    run(folder, "-m", "visdet", "train", f"{name}.py", *options)
    (best,) = (folder / "work_dirs" / name).glob("best_*.pth")
    run(folder, "-m", "visdet", "test", f"{name}.py", str(best), "--work-dir", f"test_{name}")
    (found,) = [read_json(path) for path in (folder / f"test_{name}").glob("*/*.json")]
    assert found["coco/bbox_mAP_50"] >= (on_gpu if has_gpu else on_cpu)
    images = read_json(folder / "data/trees/val.json")["images"]
    files = [f"data/trees/images/{image['file_name']}" for image in images]
    run(folder, "-m", "visdet", "infer", f"{name}.py", str(best), *files, "--out-dir", f"found_{name}")
    assert len(list((folder / f"found_{name}").rglob("*.png"))) == len(files) == 13
