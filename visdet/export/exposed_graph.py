"""An ONNX graph that another program has written, with all of its tensors as outputs."""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from visdet.errors import MissingFileError

from .check import Arrays
from .errors import ExportError

_SHAPES = ("Shape", "Size")  # What these operators return does not depend on the numbers of their input.
_MOVING = {
    "Identity",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Concat",
    "Split",
    "Slice",
    "Gather",
    "GatherElements",
    "GatherND",
    "Expand",
    "Tile",
}
_TRACE = "pkg.torch.onnx.stack_trace"


class ExposedGraph:
    """The graph of an ONNX file.

    Attributes:
        model: the file's content, in which every node has a name and functions are written out.
        inputs: the ONNX type of each input, by name. outputs: the names of the outputs.
        takes_picture: whether the images are a picture as it is decoded, uint8 [H, W, 3].
        batch: the number of pictures, or None for any. image_size: their (height, width), or None for any.
    """

    def __init__(self, path: str | Path) -> None:
        import onnx
        import onnx.inliner

        if not Path(path).is_file():
            raise MissingFileError(f"the graph {path} does not exist")
        with _explained(f"{path} is no ONNX graph"):
            model = onnx.load(path)
        self.model = onnx.inliner.inline_local_functions(model)
        graph = self.model.graph
        for number, node in enumerate(graph.node):
            node.name = node.name or f"{node.op_type}_{number}"
        constants = {value.name for value in graph.initializer}
        self.inputs = {
            given.name: given.type.tensor_type for given in graph.input if given.name not in constants
        }
        self.outputs = [output.name for output in graph.output]

        types = self.inputs.values()
        sizes = [[axis.dim_value or None for axis in given.shape.dim] for given in types]
        images = next((size for size in sizes if len(size) == 4), None)
        if images is None and not any(map(_is_picture, types)):
            raise ExportError(f"{path} takes no pictures: no input has four axes, or is uint8 [H, W, 3]")
        self.takes_picture = images is None
        batch, _, height, width = images or (1, 3, None, None)
        self.batch: int | None = batch
        self.image_size = (height, width) if height and width else None

    def type_of(self, name: str) -> np.dtype:
        """Return the type of the numbers of an input."""
        import onnx

        return onnx.helper.tensor_dtype_to_np_dtype(self.inputs[name].elem_type)

    @cached_property
    def of_images(self) -> list[str]:
        """The names of the tensors that depend on the numbers in the inputs, in the order of execution."""
        names = dict.fromkeys(self.inputs)
        for node in self.model.graph.node:
            if node.op_type not in _SHAPES and not names.keys().isdisjoint(node.input):
                names.update(dict.fromkeys(filter(None, node.output)))
        return [name for name in names if name not in self.inputs]

    def function(self, runtime: str, is_exposed: bool = False) -> Callable[[Arrays], Arrays]:
        """Return the graph as a function of named arrays in a runtime, as its own documentation opens it.

        Args:
            runtime: a name of ``RUNTIMES``.
            is_exposed: return all tensors of ``of_images`` and, in onnxruntime, leave out optimisations.

        Raises:
            ExportError: the runtime cannot load the graph or, in a call, run it.
        """
        import onnx

        model = copy.deepcopy(self.model)
        if is_exposed:
            model.graph.output.extend(
                onnx.ValueInfoProto(name=name) for name in self.of_images if name not in self.outputs
            )
        with _explained(f"{runtime} cannot load the graph"):
            run = RUNTIMES[runtime](model.SerializeToString(), is_exposed)
        return _explained(f"{runtime} cannot run the graph")(run)

    def first_of(self, differing: Iterable[str], wrong: Iterable[str]) -> Any:
        """Return the node at which the wrong outputs begin to differ.

        It is a node whose output differs and whose inputs do not. A tensor without a counterpart counts as one that
        differs, so that there may be several such nodes. That one is returned from which most of the differing tensors
        on the way to the outputs come.

        Args:
            differing: names of tensors. wrong: the names of outputs, which differ, too.
        """
        needed = set(wrong)
        differing = needed.union(differing)
        way = []
        for node in reversed(self.model.graph.node):
            if not differing.isdisjoint(node.output) and not needed.isdisjoint(node.output):
                way.append(node)
                needed.update(differing.intersection(node.input))
        begins: dict[str, set[int]] = {}
        reached: Counter[int] = Counter()
        for number, node in reversed([*enumerate(way)]):
            own = set().union(*(begins.get(name, ()) for name in node.input)) or {number}
            begins.update(dict.fromkeys(node.output, own))
            reached.update(own)
        return way[max(reached, key=lambda number: (reached[number], number))]

    def computing(self, node: Any) -> list[Any]:
        """Return the nodes that have computed the inputs of a node which depend on pictures, each before others moved,
        chose or repeated the numbers.
        """
        of_images = set(self.of_images)
        makers = {}
        for maker in self.model.graph.node:
            makers.update(dict.fromkeys(maker.output, maker))
        found = {}
        names = [*node.input]
        for name in names:
            maker = makers.get(name)
            if maker is None or name not in of_images:
                continue
            if maker.op_type in _MOVING:
                names += maker.input
            else:
                found[maker.name] = maker
        return list(found.values())


def _is_picture(given: Any) -> bool:
    import onnx

    axes = given.shape.dim
    return given.elem_type == onnx.TensorProto.UINT8 and len(axes) == 3 and axes[-1].dim_value == 3


def source_of(node: Any) -> str:
    """Return the line of Python that an exporter has kept as the source of a node, or an empty text."""
    kept = {entry.key: entry.value for entry in node.metadata_props}
    lines = re.findall(r'File "(.+?)", line (\d+)', kept.get(_TRACE, "") or node.doc_string)
    own = [line for line in lines if "/torch/nn/" not in line[0]] or lines
    return ":".join(own[-1]) if own else ""


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise an ExportError that says what cannot be done within the block."""
    try:
        yield
    except Exception as error:  # Each runtime has exceptions of its own, which derive from this class alone.
        raise ExportError(f"{what}: {error}") from error


def _onnxruntime(content: bytes, is_exposed: bool) -> Callable[[Arrays], Arrays]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if is_exposed:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Arrays) -> Arrays:
        found = dict(zip(names, session.run(None, inputs), strict=True))
        return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}

    return run


def _openvino(content: bytes, _: bool, options: dict[str, str] | None = None) -> Callable[[Arrays], Arrays]:
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model=content), "CPU", options or {})

    def run(inputs: Arrays) -> Arrays:
        found = compiled(inputs)
        return {name: found[port] for port in compiled.outputs for name in port.names}

    return run


RUNTIMES: dict[str, Callable[..., Callable[[Arrays], Arrays]]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "openvino-f32": partial(_openvino, options={"INFERENCE_PRECISION_HINT": "f32"}),
}
