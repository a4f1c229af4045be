"""Convolutions of the backbone and the neck in int8, by onnxruntime's static quantisation.

What follows the neck stays in float32: the weights of attention and of the aggregation lose 19 to 25 % in int8 (a
public study), and coordinates and boxes need more than 8 bits.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .package import arrays_of

_OF_FEATURES = re.compile(r"\.(img_)?(backbone|neck)'")  # among the modules that a node comes from


def quantize(path: Path, inputs: Iterable[dict[str, Tensor]]) -> None:
    """Quantise a file of ONNX in place. The ranges of its maps are those of the inputs."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    graph = onnx.load(path).graph
    names = [given.name for given in graph.input]
    convolutions = [node.name for node in graph.node if node.op_type == "Conv" and _is_of_features(node)]

    remaining = (arrays_of(given, names) for given in inputs)

    class Reader(CalibrationDataReader):
        """Gives the inputs one by one."""

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(remaining, None)

    quant_pre_process(path, path, skip_onnx_shape=True, skip_symbolic_shape=True)
    quantize_static(path, path, Reader(), per_channel=True, nodes_to_quantize=convolutions)


def _is_of_features(node: Any) -> bool:
    return any(_OF_FEATURES.search(fact.value) for fact in node.metadata_props)
