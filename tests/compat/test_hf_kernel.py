"""The kernel repository of ``make hf-kernel``: complete without visdet, and loaded by Hugging Face's ``kernels``."""

import importlib.util
import os
import platform
import subprocess
import sys

import pytest
import torch
from disk import names_in
from json_files import read_json
from make_hf_kernel import make
from programs import ROOT

from visdet.ops import build_info, ms_deform_attn

if os.environ.get("VISDET_CHECK_TRANSFORMERS", "0") in ("", "0"):
    HAS_KERNELS = importlib.util.find_spec("kernels") is not None
else:
    HAS_KERNELS = True  # make check-transformers installs it, and skips nothing
needs_kernels = pytest.mark.skipif(
    not HAS_KERNELS, reason="kernels is not installed: make check-transformers"
)

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])

# What a program without visdet does with a repository: the layer in the place of a plain one.
PRELUDE = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

class Refuse:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("visdet", "mmengine", "torchvision", "scipy"):
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, Refuse())

SHAPES = [(6, 8), (3, 4)]
value = torch.randn(2, 60, 2, 4, requires_grad=True, device=device)
locations = torch.rand(2, 5, 2, 2, 3, 2, requires_grad=True, device=device)
weights = torch.rand(2, 5, 2, 2, 3, requires_grad=True, device=device)
starts = torch.tensor([0, 48], device=device)
arguments = value, torch.tensor(SHAPES, device=device), SHAPES, starts, locations, weights, 64

class Plain(nn.Module):
    def forward(
        self, value, value_spatial_shapes, value_spatial_shapes_list, level_start_index, sampling_locations,
        attention_weights, im2col_step,
    ):
        total = 0
        for level, ((height, width), start) in enumerate(zip(value_spatial_shapes_list, level_start_index.tolist())):
            rows = value[:, start : start + height * width].permute(0, 2, 3, 1)
            maps = rows.reshape(-1, value.shape[3], height, width)
            grid = (2 * sampling_locations[:, :, :, level] - 1).transpose(1, 2).flatten(0, 1)
            samples = F.grid_sample(maps, grid, align_corners=False)
            total = total + (samples * attention_weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]).sum(-1)
        return total.view(value.shape[0], -1, sampling_locations.shape[1]).transpose(1, 2)

def compare(layer):
    leaves = value, locations, weights
    results = []
    for module in (layer, Plain()):
        out = module(*arguments)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(results[0][0], results[1][0])  # it is another computation
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository") / "visdet-ops"
    assert make(folder) == make(folder)  # what is there already is made anew
    return folder


def run(code, **places):
    """Run a program from a folder in which it finds no visdet."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    names = "".join(f"{name} = {str(place)!r}\n" for name, place in places.items())
    command = [sys.executable, "-W", "ignore", "-c", names + PRELUDE + code]
    subprocess.run(command, check=True, timeout=300, env=environment, cwd=places["repository"])


def test_layout_and_metadata(repository):
    names = names_in(repository / "build")
    info = build_info()
    backends = ["cpu", *([f"cu{info['cuda']['toolkit'].replace('.', '')}"] if info["cuda"]["loaded"] else [])]
    assert names == [f"torch-stable-abi210-{backend}-{platform.machine()}-linux" for backend in backends]
    for name, backend in zip(names, ("cpu", "cuda"), strict=False):
        variant = repository / "build" / name
        libraries = names_in(variant, "**/*.so")
        assert libraries == [f"libvisdet_{kind}.so" for kind in ("cpu", "cuda")[: 1 + (backend == "cuda")]]
        metadata = read_json(variant / "metadata.json")
        assert metadata["id"].startswith(f"visdet_ops_{backend}") and metadata["backend"]["type"] == backend


@DEVICES
def test_the_folder_needs_torch_alone_and_refuses_a_second_copy(repository, device):
    backend = {"cpu": "cpu", "cuda": "cu[0-9]*"}[device]
    variant = next((repository / "build").glob(f"*-{backend}-*"))
    run(
        """
import importlib.util
spec = importlib.util.spec_from_file_location("visdet_ops_kernel", f"{variant}/__init__.py")
kernel = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = kernel
spec.loader.exec_module(kernel)
compare(kernel.layers.MultiScaleDeformableAttention())
assert kernel.ops.__file__.startswith(variant) and "visdet" not in sys.modules
sys.meta_path.pop(0)
sys.path.insert(0, root)
try:
    import visdet.ops
except ImportError as error:
    assert "import visdet.ops before a kernel" in str(error) and repository in str(error)
else:
    raise AssertionError("a second copy of the operators was loaded")
""",
        repository=repository,
        variant=variant,
        root=ROOT,
        device=device,
    )


@needs_kernels
@DEVICES
def test_kernels_loads_it_and_replaces_a_models_layer(repository, device):
    run(
        """
from pathlib import Path
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, register_kernel_mapping
from kernels import replace_kernel_forward_from_hub

kernel = get_local_kernel(Path(repository))
assert "visdet" not in sys.modules and kernel.ops.__file__.startswith(repository)
Extensible = type("Extensible", (Plain,), {"forward": Plain.forward})
replace_kernel_forward_from_hub(Extensible, "MultiScaleDeformableAttention")
layer = LocalLayerRepository(Path(repository), layer_name="MultiScaleDeformableAttention")
register_kernel_mapping({"MultiScaleDeformableAttention": {device: layer}})
model = kernelize(Extensible(), mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=device)
compare(model)
compare(torch.compile(model, backend="aot_eager", fullgraph=True))
""",
        repository=repository,
        device=device,
    )


@needs_kernels
def test_beside_visdet_the_kernel_has_its_operators(repository):
    from kernels import get_local_kernel

    kernel = get_local_kernel(repository)
    assert kernel.ops is sys.modules["visdet.ops"]
    assert kernel.layers.MultiScaleDeformableAttention.has_backward
    shapes = [(6, 8), (3, 4)]
    arguments = torch.randn(2, 60, 2, 4), torch.rand(2, 5, 2, 2, 3, 2), torch.rand(2, 5, 2, 2, 3)
    value, locations, weights = arguments
    layer = kernel.layers.MultiScaleDeformableAttention()
    found = layer(value, torch.tensor(shapes), shapes, None, locations, weights, 64)
    assert torch.equal(found, ms_deform_attn(value, shapes, None, locations, weights))


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "build").mkdir()
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit, match="do not belong to a kernel repository"):
        make(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
