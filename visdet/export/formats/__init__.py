"""The formats of exported models, a module each, and what each of them can do.

A module has two functions:

* ``write(program, folder)`` writes a :class:`~visdet.export.program.Program` into a folder, whose ``model.json`` is
  there.
* ``load(folder)`` returns a function of named tensors, ``{input: tensor}``, that returns ``{output: tensor}``. The
  inputs may be on any device. :class:`~visdet.export.package.Package` compares the files and the inputs with
  ``model.json``. That of a format with options takes other ``options``, too.
"""

from dataclasses import dataclass, field

_ONNX = ("onnx", "onnxscript", "onnxruntime")
_IN_16_BIT = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Format:
    """What a format can do.

    Attributes:
        packages: the names of the packages that write and run it.
        precisions: the types of image features that it has.
        files: the files of the model.
        custom_op: the runtime whose operators can be nodes of its graph, or None.
        options: what its runtime must be told when it opens the file, by name. The file cannot say it.
    """

    packages: tuple[str, ...]
    precisions: tuple[str, ...]
    files: tuple[str, ...]
    custom_op: str | None = None
    options: dict[str, str] = field(default_factory=dict)


FORMATS = {
    "pt2": Format(("torch",), _IN_16_BIT, ("model.pt2",)),
    "aoti": Format(("torch",), _IN_16_BIT, ("model.pt2",)),
    # onnxruntime has no product in bfloat16 on a CPU.
    "onnx": Format(_ONNX, ("float32", "float16", "int8"), ("model.onnx",), custom_op="tensorrt"),
    "openvino": Format(
        (*_ONNX, "openvino"),
        (*_IN_16_BIT, "int8"),
        ("model.xml", "model.bin", "model.onnx"),
        custom_op="openvino",
        # On processors that compute in bfloat16, OpenVINO does so with every layer unless it is told.
        options={"INFERENCE_PRECISION_HINT": "f32"},
    ),
}
