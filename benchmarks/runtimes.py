"""Run the ONNX graphs of small models in other programs' runtimes, and write the table of docs/export.md.

python -m benchmarks.runtimes work_dirs/runtimes --write-docs

Each model has random weights, and each runtime is a process of its own, which opens the graph without options, except
where its name says one. A cell is the largest difference from torch, relative to the largest number of an output. If a
runtime stops, it is the operator of the graph that its message names first, or else "stops".
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from visdet import init_detector
from visdet.engine.config.load import load_config
from visdet.export.check import Arrays, Differences, arrays
from visdet.export.families import family_of
from visdet.export.families.family import Family
from visdet.export.folding import with_folded_norms
from visdet.export.formats import onnx as onnx_format
from visdet.export.precision import LIMITS

from .environment import ROOT
from .exports import replace_table

FRAMES = 3  # The last of so many is compared, whose state is not empty.
SECONDS = 1800  # for one model in one runtime
_IN_BROWSERS = """
const [folder, names] = process.argv.slice(1), fs = require("fs"), ort = require("onnxruntime-web");
const numbers = {float32: Float32Array, int64: BigInt64Array, bool: Uint8Array, uint8: Uint8Array};
ort.env.wasm.numThreads = 1;
(async () => {
  const session = await ort.InferenceSession.create(`${folder}/model.onnx`, {executionProviders: ["wasm"]});
  const given = {};
  for (const [name, type, shape] of JSON.parse(names)) {
    const bytes = new Uint8Array(fs.readFileSync(`${folder}/${name}`));
    given[name] = new ort.Tensor(type, new numbers[type](bytes.buffer), shape);
  }
  const found = await session.run(given);
  for (const name of session.outputNames) fs.writeFileSync(`${folder}/${name}`, found[name].data);
})();
"""


def _dino() -> tuple[nn.Module, tuple[int, int] | None]:
    changes = {"model.backbone.base_channels": 8, "model.neck.in_channels": [16, 32, 64]}
    return init_detector(load_config("dino/dino_shapes", changes)[0], device="cpu").model, (96, 128)


def _sparsedrive() -> tuple[nn.Module, tuple[int, int] | None]:
    sys.path.insert(0, str(ROOT / "tests" / "models" / "sparsedrive"))
    from tiny_driving import HEIGHT, WIDTH, tiny_model

    return tiny_model(), (HEIGHT, WIDTH)


def _field() -> tuple[nn.Module, tuple[int, int] | None]:
    sys.path.insert(0, str(ROOT / "examples" / "gaussian_field"))
    from gaussian_field import LearnableGaussianField

    return LearnableGaussianField(500), None


MODELS = {"DINO": _dino, "SparseDrive, first stage": _sparsedrive, "Gaussian field": _field}


def _onnxruntime(folder: Path, given: Arrays) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, given)


def _in_browsers(folder: Path, given: Arrays) -> Any:
    import onnx

    for name, value in given.items():
        (folder / name).write_bytes(np.ascontiguousarray(value).tobytes())
    described = json.dumps([[name, str(value.dtype), value.shape] for name, value in given.items()])
    subprocess.run(["node", "-e", _IN_BROWSERS, folder, described], check=True)
    for output in onnx.load(folder / "model.onnx").graph.output:
        kind = onnx.helper.tensor_dtype_to_np_dtype(output.type.tensor_type.elem_type)
        yield np.fromfile(folder / output.name, kind)


def _openvino(folder: Path, given: Arrays, *options: dict[str, str]) -> Any:
    import openvino

    return openvino.Core().compile_model(folder / "model.onnx", "CPU", *options)(given).to_tuple()


def _openvino_f32(folder: Path, given: Arrays) -> Any:
    return _openvino(folder, given, {"INFERENCE_PRECISION_HINT": "f32"})


def _mnn(folder: Path, given: Arrays) -> Any:
    import _tools  # MNN's converter; its own wrapper installs a logger by pip and sends the model's name and sizes.
    import MNN
    import onnx

    graph = onnx.load(folder / "model.onnx").graph
    file = str(folder / "model.mnn")
    arguments = [
        "-f",
        "ONNX",
        "--modelFile",
        str(folder / "model.onnx"),
        "--MNNModel",
        file,
        "--bizCode",
        "none",
    ]
    _tools.mnnconvert(["mnnconvert", *arguments])
    expressions = []
    for value in given.values():
        is_float = value.dtype.kind == "f"
        kind = MNN.expr.float if is_float else MNN.expr.int
        numbers = np.ascontiguousarray(value, np.float32 if is_float else np.int32)
        expressions.append(MNN.expr.const(numbers, list(value.shape), MNN.expr.NCHW, kind))
    outputs = [output.name for output in graph.output]
    return [
        found.read()
        for found in MNN.nn.load_module_from_file(file, list(given), outputs).forward(expressions)
    ]


def _tvm(folder: Path, given: Arrays) -> Any:
    import onnx
    import tvm
    from tvm.relax import VirtualMachine
    from tvm.relax.frontend.onnx import from_onnx

    program = tvm.compile(from_onnx(onnx.load(folder / "model.onnx")), tvm.target.Target("llvm"))
    found = VirtualMachine(program, tvm.cpu())["main"](*map(tvm.runtime.tensor, given.values()))
    return [value.numpy() for value in ([found] if hasattr(found, "numpy") else found)]


def _tract(folder: Path, given: Arrays) -> Iterator[np.ndarray]:
    import tract

    model = tract.onnx().load(str(folder / "model.onnx")).into_model().into_runnable()
    for found in model.run(list(given.values())):
        try:
            yield found.to_numpy()
        except tract.TractError:  # These integers have a type that only tract has.
            yield found.convert_to(tract.DatumType.I64).to_numpy()


def _iree(folder: Path, given: Arrays) -> Any:
    import iree.compiler
    import iree.runtime
    from iree.compiler.tools import import_onnx

    file = str(folder / "model.mlir")
    arguments = [str(folder / "model.onnx"), "-o", file, "--opset-version", str(onnx_format.OPSET)]
    subprocess.run([sys.executable, "-m", import_onnx.__name__, *arguments], check=True)
    options = {"input_type": "onnx", "extra_args": ["--iree-llvmcpu-target-cpu=host"]}
    code = iree.compiler.compile_file(file, target_backends=["llvm-cpu"], **options)
    context = iree.runtime.SystemContext(config=iree.runtime.Config("local-sync"))
    module = iree.runtime.VmModule.copy_buffer(context.instance, code)
    context.add_vm_module(module)
    found = context.modules[module.name].main_graph(*given.values())
    return map(np.asarray, found if isinstance(found, tuple) else [found])


def _reference(folder: Path, given: Arrays) -> Any:
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(str(folder / "model.onnx")).run(None, given)


# The packages, by which versions are told, and the runtimes.
RUNTIMES: dict[str, tuple[str, Callable[[Path, Arrays], Any]]] = {
    "onnxruntime": ("onnxruntime", _onnxruntime),
    "onnxruntime-web, wasm": ("", _in_browsers),
    "OpenVINO, f32": ("openvino", _openvino_f32),
    "OpenVINO, no options": ("openvino", _openvino),
    "MNN": ("MNN", _mnn),
    "TVM": ("apache-tvm", _tvm),
    "tract": ("tract", _tract),
    "IREE": ("iree-base-runtime", _iree),
    "onnx's reference": ("onnx", _reference),
}


def write(name: str, folder: Path) -> Family:
    """Write a model into a folder, with inputs and the outputs in torch, and return it."""
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    family = family_of(model, shape, 1 if shape else 257)
    folder.mkdir(parents=True, exist_ok=True)
    onnx_format.write(family_of(with_folded_norms(model), shape, family.batch).program(), folder)
    state: dict[str, torch.Tensor] = {}
    for call in next(family.cases())[:FRAMES]:
        given = {**call, **state}
        found = family.run(given)
        state = {name: found[output] for name, output in family.states.items()}
    np.savez(folder / "given.npz", **arrays(given))
    np.savez(folder / "expected.npz", **arrays(found))
    return family


def run(runtime: str, folder: Path) -> None:
    """Run the graph of a folder, and write what it returns. This is the process of a runtime."""
    import onnx

    content = np.load(folder / "given.npz")
    read = [given.name for given in onnx.load(folder / "model.onnx").graph.input]
    found = RUNTIMES[runtime][1](folder, {name: content[name] for name in read})
    np.savez(folder / "found.npz", *map(np.asarray, found))


def cell(runtime: str, folder: Path, family: Family) -> str:
    """Return what the table says of a model in a runtime."""
    import onnx

    command = [sys.executable, "-m", "benchmarks.runtimes", str(folder), "--one", runtime]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"more than {SECONDS // 60} minutes"
    if done.returncode:
        message = done.stdout + done.stderr
        print(message[-2000:])
        kinds = {node.op_type for node in onnx.load(folder / "model.onnx").graph.node}
        named = re.search(rf"\b({'|'.join(kinds)})\b", message[-2000:])
        return named[0] if named else "stops"
    expected, content = dict(np.load(folder / "expected.npz")), np.load(folder / "found.npz")
    found = {}
    for (name, value), number in zip(expected.items(), content.files, strict=True):
        own = content[number]
        found[name] = own.reshape(value.shape) if own.size == value.size else own
    differences = Differences()
    differences.add(expected, found, family.rows, LIMITS["float32"])
    return f"{max(differences.largest.values()):.0e}"


def main(arguments: list[str]) -> None:
    """Write the models, run all runtimes, and print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.runtimes", description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder to write")
    parser.add_argument("--runtimes", nargs="+", default=list(RUNTIMES), choices=RUNTIMES, metavar="NAME")
    parser.add_argument("--one", choices=RUNTIMES, help=argparse.SUPPRESS)
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/export.md")
    args = parser.parse_args(arguments)
    if args.one:
        run(args.one, args.folder)
        return
    families = {name: write(name, args.folder / str(number)) for number, name in enumerate(MODELS)}
    rows = []
    for runtime in args.runtimes:
        package = RUNTIMES[runtime][0]
        version = importlib.metadata.version(package) if package else ""
        cells = [
            cell(runtime, args.folder / str(number), family)
            for number, family in enumerate(families.values())
        ]
        rows.append([f"{runtime} {version}".strip(), *cells])
        print(*rows[-1], sep=" | ", flush=True)
    if args.write_docs:
        replace_table("runtimes", ["runtime", *MODELS], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
