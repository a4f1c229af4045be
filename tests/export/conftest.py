"""What several tests of exports need."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.export.small_models import SMALL
from visdet import init_detector
from visdet.engine.config.load import load_config

CLASSES = ["circle", "square", "triangle", "star", "ring", "cross"]
# In one stage, because the compilation of sizes that may change takes long.
TRAINED = {
    **SMALL,
    "model.as_two_stage": False,
    "model.with_box_refine": False,
    "model.bbox_head.num_classes": len(CLASSES),
    "test_dataloader.dataset.metainfo": {"classes": CLASSES},
    "test_dataloader.dataset.ann_file": "ann.json",
    "test_dataloader.dataset.data_prefix": {"img": "images/"},
}


@pytest.fixture(autouse=True, scope="session")
def quick_to_compile():
    """Let AOTInductor leave out optimisations, vector instructions among them, which take minutes. The numbers stay."""
    torch._inductor.config.aot_inductor.debug_compile = True
    torch._inductor.config.cpp.vec_isa_ok = False


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a config and a checkpoint."""
    cfg, _ = load_config("deformable_detr/deformable-detr_small_coco", TRAINED)
    torch.manual_seed(0)
    detector = init_detector(cfg)
    for parameter in detector.model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("trained") / "small.pth"
    meta = {"dataset_meta": {"classes": CLASSES}, "score_thresholds": {"circle": 0.8}}
    torch.save({"state_dict": detector.model.state_dict(), "meta": meta}, path)
    return cfg, path


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """Return a function that builds a program of the examples, and returns its path."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    source, folder = Path(__file__).parents[2] / "examples" / "aoti", tmp_path_factory.mktemp("programs")

    def cmake(*arguments):
        return subprocess.run(["cmake", *arguments], capture_output=True, text=True)

    configured = cmake("-S", source, "-B", folder, f"-DTORCH={Path(torch.__file__).parent}")
    if "Could NOT find" in configured.stderr:
        pytest.skip("the headers of libjpeg, libpng or OpenSSL are not installed")

    def built(name):
        done = cmake("--build", folder, "--target", name)
        assert done.returncode == 0, configured.stderr + done.stdout + done.stderr
        return folder / name

    return built
