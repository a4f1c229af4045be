"""The bridge to ultralytics, which replaces the deformable attention of its RT-DETR by visdet's.

Exports keep the package's own implementation.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ._bridge import Bridge, CompatWarning

__all__ = ["CompatWarning", "install", "installed", "patched", "uninstall"]

_MODULE = "ultralytics.nn.modules.transformer"
_FUNCTION, _CLASS = "multi_scale_deformable_attn_pytorch", "MSDeformAttn"
_PARAMETERS = ("value", "value_spatial_shapes", "sampling_locations", "attention_weights")
_FORWARD = ("self", "query", "refer_bbox", "value", "value_shapes", "value_mask")


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    from ._attention import attend, attend_ragged, disagreement, takes
    from ._fused_attention import module_disagreement

    original = vars(module).get(_FUNCTION)
    if original is None or tuple(inspect.signature(original).parameters) != _PARAMETERS:
        bridge.warn(module, f"{_FUNCTION} is missing, or its arguments are not {_PARAMETERS}")
        return

    @functools.wraps(original)
    def attention(
        value: Any, value_spatial_shapes: Any, sampling_locations: Any, attention_weights: Any
    ) -> Any:
        arguments = value, value_spatial_shapes, sampling_locations, attention_weights
        if not takes(value):
            return original(*arguments)
        if sampling_locations.dim() == 6:  # The shape is [B, Q, G, L, P, 2] in versions before 8.4.
            return attend(*arguments)
        levels = len(value_spatial_shapes)
        return attend_ragged(*arguments, [sampling_locations.shape[3] // levels] * levels)

    problem = disagreement(attention, original, "folded")
    if problem:
        problem = disagreement(attention, original, "levels") and problem
    if problem:
        bridge.warn(module, f"{_FUNCTION} {problem}")
        return
    bridge.replace(module, _FUNCTION, attention)
    yield _FUNCTION
    owner: Any = vars(module).get(_CLASS)
    forward = vars(owner).get("forward") if isinstance(owner, type) else None
    if forward is None or tuple(inspect.signature(forward).parameters) != _FORWARD:
        bridge.warn(module, f"{_CLASS} is missing, or the arguments of its forward are not {_FORWARD}")
        return
    fused = _fused_forward(forward)
    problem = module_disagreement(owner, forward, fused, [[(3, 4), (2, 2)]])
    if problem:
        bridge.warn(module, f"{_CLASS}.forward {problem}")
        return
    bridge.replace(owner, "forward", fused)
    yield f"{_CLASS}.forward, fused"


def _fused_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    from ._attention import takes
    from ._fused_attention import attend_fused

    @functools.wraps(original)
    def forward(
        self: Any, query: Any, refer_bbox: Any, value: Any, value_shapes: Any, value_mask: Any = None
    ) -> Any:
        fits = refer_bbox.dim() == 4 and refer_bbox.shape[2] == 1 and refer_bbox.shape[3] in (2, 4)
        rows = sum(height * width for height, width in value_shapes)
        if not fits or len(value_shapes) != self.n_levels or rows != value.shape[1] or not takes(value):
            return original(self, query, refer_bbox, value, value_shapes, value_mask)
        return attend_fused(self, query, value, value_mask, refer_bbox, value_shapes, self.n_points)[0]

    return forward


bridge = Bridge("ultralytics", "ultralytics", lambda name: name == _MODULE, _patch)
install, uninstall, installed = bridge.install, bridge.uninstall, bridge.installed
patched = bridge.patched
