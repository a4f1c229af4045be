"""The bridge to RF-DETR (package ``rfdetr``), which replaces its deformable attention by visdet's.

A model that has been prepared for export keeps its own implementation.
"""

import functools
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ._bridge import Bridge, CompatWarning

__all__ = ["CompatWarning", "install", "installed", "patched", "uninstall"]

_MODULE = "rfdetr.models.ops.modules.ms_deform_attn"
_CLASS = "MSDeformAttn"
_FORWARD = (
    "self",
    "query",
    "reference_points",
    "input_flatten",
    "input_spatial_shapes",
    "input_level_start_index",
    "input_padding_mask",
)


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    import torch

    from ._attention import takes
    from ._fused_attention import attend_fused, module_disagreement

    owner: Any = vars(module).get(_CLASS)
    original = vars(owner).get("forward") if isinstance(owner, type) else None
    if original is None or tuple(inspect.signature(original).parameters)[: len(_FORWARD)] != _FORWARD:
        bridge.warn(
            module, f"{_CLASS} is missing, or its forward does not begin with the arguments {_FORWARD}"
        )
        return

    @functools.wraps(original)
    def forward(
        self: Any, query: Any, reference_points: Any, input_flatten: Any, *tables: Any, **named: Any
    ) -> Any:
        given = dict(zip(_TABLES, tables, strict=False)) | named
        shapes = given.get("input_spatial_shapes_hw")
        if shapes is None:
            shapes = given["input_spatial_shapes"]
        fits = reference_points.dim() == 4 and reference_points.shape[2] in (1, self.n_levels)
        fits = fits and reference_points.shape[3] in (2, 4) and len(shapes) == self.n_levels
        if not fits or getattr(self, "_export", False) or not takes(input_flatten):
            return original(self, query, reference_points, input_flatten, *tables, **named)
        mask = given.get("input_padding_mask")
        return attend_fused(self, query, input_flatten, mask, reference_points, shapes, self.n_points)[0]

    tables = torch.tensor([[3, 4], [2, 2]], device="cpu"), torch.tensor([0, 12], device="cpu")
    problem = module_disagreement(owner, original, forward, tables, _export=False)
    if problem:
        bridge.warn(module, f"{_CLASS}.forward {problem}")
        return
    bridge.replace(owner, "forward", forward)
    yield f"{_CLASS}.forward, fused"


_TABLES = ("input_spatial_shapes", "input_level_start_index", "input_padding_mask", "input_spatial_shapes_hw")
bridge = Bridge("rfdetr", "rfdetr", lambda name: name == _MODULE, _patch)
install, uninstall, installed = bridge.install, bridge.uninstall, bridge.installed
patched = bridge.patched
