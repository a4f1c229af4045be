"""OpenVINO, converted from the ONNX graph and checked on the CPU."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..openvino_extension import EXTENSION, build_extension
from ..program import Program, outputs_of
from . import onnx

PACKAGES = (*onnx.PACKAGES, "openvino")


def write(program: Program, folder: Path) -> None:
    """Write ``model.onnx``, and ``model.xml`` and ``model.bin`` of it, into a folder. Weights keep their type."""
    import openvino

    onnx.write(program, folder)
    core = openvino.Core()
    if program.custom_op is not None:
        core.add_extension(build_extension(folder))
    openvino.save_model(core.read_model(folder / "model.onnx"), folder / "model.xml", compress_to_fp16=False)


def load(folder: Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the function of named tensors that ``model.xml`` of a folder is, in float32 on the CPU."""
    import openvino

    core = openvino.Core()
    if (folder / EXTENSION).is_file():
        core.add_extension(folder / EXTENSION)
    compiled = core.compile_model(folder / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    read = {name for port in compiled.inputs for name in port.names}
    names = outputs_of(folder)

    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = compiled({name: value.cpu().numpy() for name, value in inputs.items() if name in read})
        return {name: torch.from_numpy(outputs[name]) for name in names}

    return run
