"""OpenVINO, converted from the ONNX graph and checked on the CPU."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from visdet.files.writing import written_whole

from ..openvino_extension import EXTENSION, build_extension
from ..package import Package, arrays_of
from ..program import Program
from . import FORMATS, onnx

_OPTIONS = FORMATS["openvino"].options


def write(program: Program, folder: Path) -> None:
    """Write ``model.onnx``, and ``model.xml`` and ``model.bin`` of it, into a folder. Weights keep their type."""
    import openvino

    onnx.write(program, folder)
    core = openvino.Core()
    if program.custom_op is not None:
        core.add_extension(build_extension(folder))
    model = core.read_model(folder / "model.onnx")
    with written_whole(folder / "model.bin") as weights, written_whole(folder / "model.xml") as graph:
        try:
            openvino.save_model(model, graph, compress_to_fp16=False)  # and the weights beside it
        except RuntimeError as error:
            raise OSError(f"OpenVINO says {str(error).strip()!r}; is the disk full?") from error
        graph.with_suffix(".bin").replace(weights)


def load(
    folder: str | Path, options: dict[str, str] = _OPTIONS
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the function of named tensors that ``model.xml`` of a folder is, in float32 on the CPU.

    ``options``: what OpenVINO is told when it opens the file, such as nothing.
    """
    import openvino

    package = Package.open(folder, "model.xml", "model.bin")
    core = openvino.Core()
    extension = package.folder / EXTENSION
    if extension.is_file():
        core.add_extension(extension)
    compiled = core.compile_model(package.folder / "model.xml", "CPU", options)
    read = {name for port in compiled.inputs for name in port.names}
    outputs = package.description["outputs"]
    names = [
        next((name for name in outputs if name in port.names), port.any_name) for port in compiled.outputs
    ]

    def call(inputs: dict[str, Tensor]) -> Iterable[Tensor]:
        found = compiled(arrays_of(inputs, inputs.keys() & read))
        return [torch.from_numpy(found[name]) for name in names]

    return package.function(names, call)
