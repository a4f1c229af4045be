"""What was exported runs in a process without visdet's models."""

import subprocess
import sys

import visdet
from tests.export.test_export import built

PROGRAM = """
import sys, pathlib, numpy as np, torch, visdet.ops
folder = pathlib.Path(sys.argv[1])
sample = np.load(folder / "sample.npz")
model = torch.export.load(folder / "model.pt2").module()
given = [torch.from_numpy(sample[name]) for name in sample.files if name.startswith("input.")]
scores = dict(zip(("bboxes", "scores", "labels"), model(*given)))["scores"]
torch.testing.assert_close(scores, torch.from_numpy(sample["output.scores"]))
assert not any(name.startswith(("visdet.models", "visdet.engine", "mmengine")) for name in sys.modules)
"""


def test_a_program_needs_the_operators_alone(tmp_path):
    small = {"model.encoder.num_layers": 1, "model.decoder.num_layers": 1}
    visdet.export(built("deformable_detr/deformable-detr_shapes", **small), tmp_path, "pt2")
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
