"""What tools import, and what a run imports before its first iteration: nothing that is slow and not needed."""

import pickle
import platform
import resource

import numpy as np
import pytest
from programs import ROOT, run_python


def run(code, folder, *arguments, without=(), **variables):
    """Run Python without some variables of the environment and with others."""
    removed = dict.fromkeys(without)
    options = {"MPLBACKEND": "Agg", **removed, **variables}
    return run_python("-W", "ignore", "-c", code, *arguments, cwd=folder, **options)[0]


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("print-config", [ROOT / "configs/deformable_detr/deformable-detr_shapes.py"]),
        ("curves", ["scalars.json"]),
        ("make-shapes", ["shapes", "--num-train", 1, "--num-val", 1, "--num-workers", 1]),
        ("prepare-nuscenes", ["--convert", "infos.pkl"]),
        ("make-anchors", ["infos.pkl", "--det", 1, "--map", 0, "--motion", 0, "--plan", 0]),
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
        "import sys\n"
        "from visdet.commands import main\n"
        "main()\n"
        "assert not {'torch', 'torchvision', 'mmengine.runner'} & set(sys.modules)\n"
    )
    run(code, tmp_path, tool, *arguments)


DATA = """
from mmengine.config import Config
from visdet.registry import DATASETS, TRANSFORMS
cfg = Config.fromfile("CONFIGS/sparsedrive/sparsedrive_toy_stage2.py")
steps = [*cfg.train_dataloader.dataset.pipeline, *cfg.test_dataloader.dataset.pipeline]
assert len([TRANSFORMS.get(step.type) for step in steps]) > 10
assert DATASETS.get("ShapesDataset")
check("torchvision visdet.datasets.nuscenes")
"""
MODEL = """
from visdet.engine import load_config
from visdet.registry import MODELS
cfg, _ = load_config("CONFIGS/deformable_detr/deformable-detr_shapes.py")
MODELS.build(cfg.model)
check("scipy.optimize scipy.cluster torchvision matplotlib.figure visdet.datasets visdet.evaluation "
      "visdet.visualization tensorboard pycocotools faster_coco_eval")
"""
RUNNER = """
import yapf.yapflib.yapf_api as yapf
calls, format_code = [], yapf.FormatCode
yapf.FormatCode = lambda *args, **kwargs: calls.append(1) or format_code(*args, **kwargs)
from visdet.engine import build_runner, load_config
cfg, _ = load_config("CONFIGS/deformable_detr/deformable-detr_shapes.py", None, "work_dirs")
runner = build_runner(cfg)
check("torchvision torch._dynamo matplotlib.figure visdet.datasets")
import visdet.evaluation, visdet.models, visdet.visualization
from visdet.datasets import *
check("scipy.optimize scipy.cluster scipy.spatial matplotlib.figure pycocotools faster_coco_eval shapely "
      "visdet.compat")
assert not calls, calls  # yapf takes 0.2 to 0.6 s
before = runner.cfg.pretty_text
runner.cfg.note = "changed"
assert runner.cfg.pretty_text != before and "changed" in runner.cfg.pretty_text
assert "note" not in cfg
"""
CHECK = """
import sys

def check(slow):
    assert not {*slow.split()} & {*sys.modules}, {*slow.split()} & {*sys.modules}

"""


@pytest.mark.parametrize("code", [DATA, MODEL, RUNNER], ids=["data", "model", "runner"])
def test_what_is_slow_is_imported_where_it_is_needed(code, tmp_path):
    run(CHECK + code.replace("CONFIGS", str(ROOT / "configs")), tmp_path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_tools_let_idle_threads_sleep_before_torch_is_loaded(given, expected):
    code = (
        "import os, sys, visdet.command_line; visdet.command_line.prepare_process();"
        "print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    )
    said = run(code, ROOT, without=("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"), **given)
    assert said.split() == [expected, "False"]


_FAULTS = """
import resource
import visdet.command_line
visdet.command_line.prepare_process()
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
    faults = run(_FAULTS, ROOT, without=names, **{"THP_MEM_ALLOC_ENABLE": "0", **given})
    pages = 4 * 16 * (16 << 20) // resource.getpagesize()  # of all tensors together
    assert (int(faults) < pages // 100) == is_kept


_UNCHANGED = """
import ctypes, importlib, os, pathlib, signal, sys, threading
import cv2, matplotlib, mmengine.runner, numpy, scipy, torch, torchvision  # What they change is theirs.
import visdet

class Watched(ctypes.CDLL):
    def __getattr__(self, name):
        assert name != "mallopt", "the allocator is set"
        return super().__getattr__(name)

def state():
    streams = [sys.stdin, sys.stdout, sys.stderr]
    texts = [stream.__repr__() for stream in streams] + [sys.stdout.errors, sys.stderr.errors]
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    of_torch = [torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()]
    of_torch += [torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()]
    hooks = [sys.excepthook, sys.meta_path[:], sys.getrecursionlimit(), threading.active_count()]
    return [dict(os.environ), streams, texts, handlers, of_torch, hooks]

ctypes.CDLL = Watched
root = pathlib.Path(visdet.__file__).parent
paths = [path.relative_to(root.parent).with_suffix("") for path in sorted(root.rglob("*.py"))]
names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
assert len(names) > 300
for name in names:
    before = state()
    if not name.endswith("__main__"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            assert error.name is None or not error.name.startswith("visdet"), error
    for old, new in zip(before, state()):
        assert old == new, (name, old, new)
"""


def test_importing_any_module_changes_nothing_of_the_process(tmp_path):
    run(_UNCHANGED, tmp_path)
