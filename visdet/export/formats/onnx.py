"""ONNX with standard operators, checked in onnxruntime on the CPU."""

import contextlib
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visdet.files.writing import written_whole

from ..custom_operators import DOMAINS, load_with_plugin
from ..errors import ExportError
from ..package import Package, arrays_of
from ..precision import is_in_bfloat16
from ..program import Program
from ..quantization import quantize

OPSET = 20
_OPSET_OF_BFLOAT16 = 22  # the first one whose convolutions have it


def write(program: Program, folder: Path) -> None:
    """Write ``model.onnx`` into a folder, and check its structure."""
    import onnx

    with contextlib.redirect_stdout(io.StringIO()):  # torch prints its progress.
        graph: Any = torch.onnx.export(
            program.standard,
            input_names=list(program.inputs),
            output_names=program.outputs,
            opset_version=_OPSET_OF_BFLOAT16 if is_in_bfloat16(program.module) else OPSET,
            dynamo=True,
            verbose=False,
        )
    with written_whole(folder / "model.onnx") as path:
        graph.save(path, external_data=False)
        if program.calibration is not None:
            quantize(path, program.calibration)
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    problems = sorted(
        {
            f"{node.domain}::{node.op_type}".removeprefix("::")
            for node in model.graph.node
            if node.domain not in ("", DOMAINS.get(program.custom_op))
            or node.op_type in ("If", "Loop", "Scan")
        }
    )
    if any(value.data_type == onnx.TensorProto.DOUBLE for value in model.graph.initializer):
        problems.append("float64 constants")
    if problems:
        raise ExportError(
            f"the ONNX graph has {', '.join(problems)}, which other runtimes do not run. Export the model as pt2"
        )


def load(folder: str | Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the function of named tensors that ``model.onnx`` of a folder is in onnxruntime, on the CPU."""
    import onnx
    import onnxruntime

    package = Package.open(folder, "model.onnx")
    path = package.folder / "model.onnx"
    if any(opset.domain == DOMAINS["tensorrt"] for opset in onnx.load(path).opset_import):
        return package.function(*load_with_plugin(path))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    read = {given.name for given in session.get_inputs()}

    def call(inputs: dict[str, Tensor]) -> Iterable[Tensor]:
        return map(torch.from_numpy, session.run(None, arrays_of(inputs, read)))

    return package.function([output.name for output in session.get_outputs()], call)
