"""Nodes of visdet's operators in ONNX graphs, for runtimes that have kernels for them.

``openvino``: nodes ``visdet::ms_deform_attn`` and ``visdet::deformable_aggregation``, which are those of the C++
extension of :mod:`.openvino_extension`. ``tensorrt``: nodes of NVIDIA's MultiscaleDeformableAttnPlugin_TRT, whose
inputs are those of ``ms_deform_attn`` with tables of 32-bit integers, and whose output is [B, Q, G, C].
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import visdet.ops

from .package import arrays_of

DOMAINS: dict[str | None, str] = {"openvino": "visdet", "tensorrt": "TRT"}
_PLUGIN = "MultiscaleDeformableAttnPlugin_TRT"


def _own(
    name: str, value: Tensor, level_shapes: Tensor, level_starts: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    """Return a node of visdet, whose output is [B, Q, C] for values [B, S, C] or, in groups, [B, S, G, C / G]."""
    B, _, *channels = value.shape
    Q = locations.shape[1]
    inputs = (value, level_shapes, level_starts, locations, weights)
    return _node(f"visdet::{name}", inputs, (B, Q, math.prod(channels)))


def _plugin(
    value: Tensor, level_shapes: Tensor, level_starts: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    B, _, G, C = value.shape
    Q = locations.shape[1]
    inputs = (value, level_shapes.int(), level_starts.int(), locations, weights)
    return _node(f"TRT::{_PLUGIN}", inputs, (B, Q, G, C), plugin_version="2").flatten(2)


def _node(name: str, inputs: tuple[Tensor, ...], shape: tuple[int, ...], **attributes: Any) -> Tensor:
    return torch.onnx.ops.symbolic(name, inputs, attributes, dtype=torch.float32, shape=shape, version=1)


# Functions with the arguments of the operators in visdet.ops, by the runtime and the operator.
NODES: dict[str | None, dict[str, Callable[..., Tensor]]] = {
    "openvino": {
        "ms_deform_attn": partial(_own, "ms_deform_attn"),
        "deformable_aggregation": partial(_own, "deformable_aggregation"),
    },
    "tensorrt": {"ms_deform_attn": _plugin},
}


def load_with_plugin(path: Path) -> tuple[list[str], Callable[[dict[str, Tensor]], Iterable[Tensor]]]:
    """Return the names of the outputs of a graph with nodes of NVIDIA's plugin, and the function that it is, by onnx's
    reference implementation.

    TensorRT is not needed and not run: ``visdet.ops.ms_deform_attn`` computes the plugin's nodes.
    """
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    def compute(self: Any, *inputs: np.ndarray, plugin_version: str) -> tuple[np.ndarray]:
        value, shapes, starts, locations, weights = map(torch.tensor, inputs)
        result = visdet.ops.ms_deform_attn(value, shapes.long(), starts.long(), locations, weights)
        return (result.unflatten(-1, value.shape[2:]).numpy(),)

    class GatherElements(OpRun):
        """onnx's own takes at most 64 rows."""

        def _run(self, data: np.ndarray, indices: np.ndarray, axis: int | None = None) -> tuple[np.ndarray]:
            return (np.take_along_axis(data, indices, axis=axis or 0),)

    node = type(_PLUGIN, (OpRun,), {"op_domain": DOMAINS["tensorrt"], "_run": compute})
    evaluator = ReferenceEvaluator(str(path), new_ops=[node, GatherElements])

    def call(inputs: dict[str, Tensor]) -> Iterable[Tensor]:
        return map(torch.from_numpy, evaluator.run(None, arrays_of(inputs, evaluator.input_names)))

    return evaluator.output_names, call
