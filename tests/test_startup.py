"""What tools import, and what a run imports before its first iteration: nothing that is slow and not needed."""

import os
import pickle
import platform
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(code, folder, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("print_config", [ROOT / "configs/deformable_detr/deformable-detr_shapes.py"]),
        ("analyze_logs", ["scalars.json"]),
        ("make_shapes", ["shapes", "--num-train", 1, "--num-val", 1, "--num-workers", 1]),
        ("prepare_nuscenes", ["--convert", "infos.pkl"]),
        ("make_anchors", ["infos.pkl", "--det", 1, "--map", 0, "--motion", 0, "--plan", 0]),
    ],
)
def test_a_tool_that_needs_no_model_imports_no_torch(tool, arguments, tmp_path):
    (tmp_path / "scalars.json").write_text('{"step": 1, "loss": 2.0}\n')
    frame = {
        "timestamp": 0,
        "scene_token": "a scene",
        "gt_boxes": np.ones((2, 7)),
        "valid_flag": np.ones(2, bool),
    }
    (tmp_path / "infos.pkl").write_bytes(pickle.dumps({"infos": [frame], "metadata": {}}))
    code = (
        "import runpy, sys\n"
        "sys.argv[:] = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "assert not {'torch', 'torchvision', 'mmengine.runner'} & set(sys.modules)\n"
    )
    done = run(code, tmp_path, ROOT / "tools" / f"{tool}.py", *arguments)
    assert done.returncode == 0, done.stderr


def test_data_are_read_without_what_other_data_need(tmp_path):
    code = (
        "import sys\n"
        "from mmengine.config import Config\n"
        "from visdet.registry import DATASETS, TRANSFORMS\n"
        f"cfg = Config.fromfile(r'{ROOT}/configs/sparsedrive/sparsedrive_toy_stage2.py')\n"
        "steps = [*cfg.train_dataloader.dataset.pipeline, *cfg.test_dataloader.dataset.pipeline]\n"
        "assert len([TRANSFORMS.get(step.type) for step in steps]) > 10\n"
        "assert DATASETS.get('ShapesDataset')\n"
        "others = {'torchvision', 'visdet.datasets.nuscenes', 'visdet.datasets.volume'}\n"
        "assert not others & set(sys.modules), others & set(sys.modules)\n"
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_model_is_built_without_what_training_alone_needs(tmp_path):
    code = (
        "import sys\n"
        "from visdet.engine import load_config\n"
        "from visdet.registry import MODELS\n"
        f"cfg, _ = load_config(r'{ROOT}/configs/deformable_detr/deformable-detr_shapes.py')\n"
        "MODELS.build(cfg.model)\n"
        "slow = {'scipy.optimize', 'scipy.cluster', 'torchvision', 'matplotlib.figure', 'visdet.datasets',\n"
        "        'visdet.evaluation', 'visdet.visualization', 'tensorboard', 'pycocotools', 'faster_coco_eval'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_runner_is_built_without_solvers_and_formats_its_config_fast(tmp_path):
    code = (
        "import sys\n"
        "import yapf.yapflib.yapf_api as yapf\n"
        "calls, format_code = [], yapf.FormatCode\n"
        "yapf.FormatCode = lambda *args, **kwargs: calls.append(1) or format_code(*args, **kwargs)\n"
        "from visdet.engine import build_runner, load_config\n"
        f"cfg, _ = load_config(r'{ROOT}/configs/deformable_detr/deformable-detr_shapes.py', None, r'{tmp_path}')\n"
        "runner = build_runner(cfg)\n"
        "slow = {'torchvision', 'torch._dynamo', 'matplotlib.figure', 'visdet.datasets'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
        "import visdet.evaluation, visdet.models, visdet.visualization\n"
        "from visdet.datasets import *\n"
        "slow = {'scipy.optimize', 'scipy.cluster', 'scipy.spatial', 'matplotlib.figure', 'pycocotools',\n"
        "        'faster_coco_eval', 'shapely', 'visdet.compat'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
        "assert not calls, calls  # yapf takes 0.2 to 0.6 s\n"
        "before = runner.cfg.pretty_text\n"
        "runner.cfg.note = 'changed'\n"
        "assert runner.cfg.pretty_text != before and 'changed' in runner.cfg.pretty_text\n"
        "assert 'note' not in cfg\n"
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_tools_let_idle_threads_sleep_before_torch_is_loaded(given, expected):
    code = (
        "import os, sys, visdet.command_line; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | given,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.split() == [expected, "False"]


_FAULTS = """
import resource
import visdet.command_line
import torch

def step():
    return [torch.ones(4 << 20) for _ in range(16)]  # 16 MiB each

step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
@pytest.mark.parametrize(
    ("given", "is_kept"),
    [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}, False)],
)
def test_tools_keep_the_memory_of_freed_tensors_unless_the_environment_sets_malloc(given, is_kept):
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS],
        env=environment | {"THP_MEM_ALLOC_ENABLE": "0"} | given,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    pages = 4 * 16 * (16 << 20) // resource.getpagesize()  # of all tensors together
    assert (int(done.stdout) < pages // 100) == is_kept
