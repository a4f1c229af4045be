"""Nodes of visdet's operators in ONNX graphs, for runtimes that have kernels for them.

``openvino``: nodes ``visdet::ms_deform_attn`` and ``visdet::deformable_aggregation``, which are those of the C++
extension of :mod:`.openvino_extension`. ``tensorrt``: nodes of NVIDIA's MultiscaleDeformableAttnPlugin_TRT, whose
inputs are those of ``ms_deform_attn`` with tables of 32-bit integers, and whose output is [B, Q, G, C].
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import visdet.ops

DOMAINS = {"openvino": "visdet", "tensorrt": "TRT"}
_PLUGIN = "MultiscaleDeformableAttnPlugin_TRT"


def _attention(value: Tensor, *arguments: Tensor) -> Tensor:
    return _node(
        "visdet::ms_deform_attn",
        (value, *arguments),
        (value.shape[0], arguments[2].shape[1], value.shape[2] * value.shape[3]),
    )


def _plugin(value: Tensor, level_shapes: Tensor, level_starts: Tensor, *arguments: Tensor) -> Tensor:
    B, _, G, C = value.shape
    return _node(
        f"TRT::{_PLUGIN}",
        (value, level_shapes.int(), level_starts.int(), *arguments),
        (B, arguments[0].shape[1], G, C),
        plugin_version="2",
    ).flatten(2)


def _aggregation(features: Tensor, *arguments: Tensor) -> Tensor:
    return _node(
        "visdet::deformable_aggregation",
        (features, *arguments),
        (features.shape[0], arguments[2].shape[1], features.shape[2]),
    )


def _node(name: str, inputs: tuple[Tensor, ...], shape: tuple[int, ...], **attributes: Any) -> Tensor:
    return torch.onnx.ops.symbolic(name, inputs, attributes, dtype=torch.float32, shape=shape, version=1)


# Functions with the arguments of the operators in visdet.ops, by the runtime and the operator.
NODES: dict[str | None, dict[str, Callable[..., Tensor]]] = {
    "openvino": {"ms_deform_attn": _attention, "deformable_aggregation": _aggregation},
    "tensorrt": {"ms_deform_attn": _plugin},
}


def load_with_plugin(path: Path) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the function that a graph with nodes of NVIDIA's plugin is, by onnx's reference implementation.

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

    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = evaluator.run(None, {name: inputs[name].cpu().numpy() for name in evaluator.input_names})
        return dict(zip(evaluator.output_names, map(torch.from_numpy, outputs), strict=True))

    return run
