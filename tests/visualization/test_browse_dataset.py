"""tools/browse_dataset.py, run as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_browse_dataset(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        f"_base_ = ['{ROOT}/configs/_base_/datasets/shapes_detection.py', '{ROOT}/configs/_base_/default_runtime.py']\n"
        f"shapes = dict(data_root='{tmp_path}/shapes/', generator=dict(num_train=6, num_val=4, image_size=64))\n"
        "train_dataloader = dict(dataset=shapes)\n"
        "val_dataloader = dict(dataset=shapes)\n"
    )
    command = [sys.executable, ROOT / "tools" / "browse_dataset.py", config, "--not-show", "--split", "val"]
    command += ["--output-dir", tmp_path / "out", "--number", "5"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    finished = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == [*(f"{i:05d}_{i:06d}.png" for i in range(4)), "sheet.png"]
    command += ["--cfg-options", "val_dataloader.dataset.pipeline=[]"]
    finished = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (
        finished.returncode == 1
        and "a pipeline must end with a transform such as PackDetInputs" in finished.stderr
    )
