"""The wheel in a new environment: the command ``visdet`` from an empty folder, without a clone."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from json_files import read_json
from programs import ROOT

CONFIG = "deformable_detr/deformable-detr_shapes"
# setup.py with the operator libraries as they are built already.
BUILD = """
import shutil, sys
from pathlib import Path
import setup

class Copied(setup.BuildOps):
    def run(self):
        built = Path(self.build_lib, "visdet", "ops")
        built.mkdir(parents=True, exist_ok=True)
        for library in Path("visdet/ops").glob("libvisdet_*.so"):
            shutil.copy(library, built)

commands = {"build_ext": Copied, "bdist_wheel": setup.Wheel, "egg_info": setup.EggInfo}
modules = [setup.Extension("visdet.ops._libraries", sources=[])]
setup.setup(ext_modules=modules, cmdclass=commands, script_args=sys.argv[1:])
"""
GENERATORS = [f"{split}_dataloader.dataset.generator" for split in ("train", "val", "test")]
SMALL = [f"{generator}.{number}=4" for generator in GENERATORS for number in ("num_train", "num_val")]
SMALL += ["train_dataloader.batch_size=2", "train_cfg.max_iters=2", "train_cfg.val_interval=2"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    options = ["build", "--build-base", folder / "build", "egg_info", "--egg-base", folder]
    options += ["bdist_wheel", "--skip-build", "--dist-dir", folder, "--bdist-dir", folder / "tree"]
    run([sys.executable, "-c", BUILD, *options], ROOT, PYTHONPATH=str(ROOT))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def visdet(wheel, tmp_path_factory):
    """A function that runs the installed program in an empty folder, and that folder."""
    folder = tmp_path_factory.mktemp("empty")
    environment = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", environment], folder)
    python = environment / "bin" / "python"
    purelib = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    # A folder in a .pth file brings torch and the others, but not what other .pth files name, such as the clone.
    Path(purelib, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run([*pip, "--ignore-installed", wheel], folder)
    return lambda *arguments: run([environment / "bin" / "visdet", *arguments], folder), folder


def run(command, folder, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "VISDET_CUDA": "0", **variables}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_has_every_config_and_nothing_that_is_no_part_of_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    configs = {f"visdet/.mim/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.py")}
    assert {name for name in names if name.startswith("visdet/.mim/configs/")} == configs
    assert all(name.startswith(("visdet/", "visdet_ops-")) for name in names)
    assert "visdet/ops/libvisdet_cpu.so" in names and not any("/csrc/" in name for name in names)


@pytest.mark.slow
def test_the_commands_run_from_an_empty_folder(visdet):
    visdet, folder = visdet
    assert CONFIG in visdet("configs") and "nothing: all is well" in visdet("doctor")
    printed = visdet("train", CONFIG, "--cfg-options", *SMALL)
    run_folder = folder / "work_dirs" / "deformable-detr_shapes"
    assert "visdet curves work_dirs/deformable-detr_shapes" in printed
    checkpoint = run_folder / "iter_2.pth"
    assert "bbox_mAP" in visdet("test", CONFIG, checkpoint, "--cfg-options", *SMALL)
    visdet("infer", CONFIG, checkpoint, "data/shapes/val", "--score-thr", 0)
    found = read_json(folder / "work_dirs" / "detections" / "predictions.json")
    assert len(found) == 4 and found[0]["file"].startswith("data/shapes/val")
    assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == ["data", "work_dirs"]
    visdet("configs", "copy", CONFIG)
    assert (folder / "configs" / "_base_" / "default_runtime.py").is_file()
