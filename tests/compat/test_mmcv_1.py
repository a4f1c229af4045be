"""mmcv 1.x itself, as pure Python, in a program that torch.distributed.launch starts under visdet.compat."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

if os.environ.get("VISDET_CHECK") != "check-mmcv1":
    spec = importlib.util.find_spec("mmcv")
    if spec is None or not (Path(spec.submodule_search_locations[0]) / "runner").exists():
        pytest.skip("mmcv 1.x is not installed: make check-mmcv1", allow_module_level=True)

PROGRAM = """
import argparse, logging, sys
import mmcv, mmcv.ops, numpy as np, torch
from mmcv.parallel import MMDataParallel, MMDistributedDataParallel
from mmcv.runner import EpochBasedRunner

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("folder")
arguments = parser.parse_args()
torch.distributed.init_process_group("gloo")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    def forward(self, x):
        return self.layer(x)
    def train_step(self, data, optimizer):
        loss = self(data).square().mean()
        return dict(loss=loss, log_vars=dict(loss=loss.item()), num_samples=4)

model = MMDistributedDataParallel(Model())
logger = logging.getLogger("quiet")
logger.setLevel(logging.ERROR)
runner = EpochBasedRunner(
    model, optimizer=torch.optim.SGD(model.parameters(), 0.1), work_dir=arguments.folder, logger=logger, max_epochs=1,
    meta=dict(score=np.float64(0.5), PALETTE=np.arange(3)),
)
runner.register_training_hooks(dict(policy="step", step=[2]), dict(grad_clip=None), dict(interval=1), None)
runner.run([[torch.rand(4, 3)] * 2], [("train", 1)])
runner.resume(arguments.folder + "/epoch_1.pth")
assert runner.epoch == 1 and runner.meta["PALETTE"].tolist() == [0, 1, 2]
model.eval()
assert model(torch.rand(4, 3)).shape == MMDataParallel(Model().eval(), device_ids=[-1])(torch.rand(4, 3)).shape
assert "a = 1" in mmcv.Config(dict(a=1)).pretty_text
boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 3], [9, 9, 12, 12]])
assert mmcv.ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5)[1].tolist() == [0, 2]
print("rank", arguments.local_rank, "has run")
"""


@pytest.mark.slow
def test_a_program_trains_saves_resumes_and_predicts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.launch", "--standalone", "--nproc_per_node", "1"]
    command = [*launch, "-m", "visdet.compat", "run", str(script), str(tmp_path)]
    folders = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert "rank 0 has run" in done.stdout, done.stderr
