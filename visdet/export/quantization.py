"""Convolutions of the backbone and the neck in int8, by onnxruntime's static quantisation.

What follows the neck stays in float32: the weights of attention and of the aggregation lose 19 to 25 % in int8 (a
public study), and coordinates and boxes need more than 8 bits.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor

_OF_FEATURES = re.compile(r"\.(img_)?(backbone|neck)'")  # among the modules that a node comes from


def quantize(path: Path, inputs: Iterable[dict[str, Tensor]]) -> None:
    """Quantise a file of ONNX in place. The ranges of its maps are those of the inputs."""
    import onnx
    from onnxruntime.quantization import quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    graph = onnx.load(path).graph
    arrays = iter([{one.name: given[one.name].cpu().numpy() for one in graph.input} for given in inputs])
    # Weights that a norm scales become constants, which alone can be quantised.
    quant_pre_process(path, path, skip_onnx_shape=True, skip_symbolic_shape=True)
    quantize_static(
        path,
        path,
        SimpleNamespace(get_next=lambda: next(arrays, None)),
        per_channel=True,
        nodes_to_quantize=[
            node.name
            for node in graph.node
            if node.op_type == "Conv" and any(_OF_FEATURES.search(p.value) for p in node.metadata_props)
        ],
    )
