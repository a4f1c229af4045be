"""The bridge to libreyolo, which adds visdet's deformable attention to libreyolo's public registry of kernels.

The kernel serves training and prediction on CPUs and CUDA GPUs. Models with different numbers of points per level
(D-FINE, DEIM) do not use the registry and keep their own implementation. ``LIBREYOLO_KERNELS=off`` disables all
kernels, including this one.
"""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ._bridge import Bridge, CompatWarning

__all__ = ["CompatWarning", "install", "installed", "patched", "uninstall"]

_SLOT, _NAME = "ms_deform_attn", "visdet"
_REGISTRY = ("register", "unregister", "clear_cache")


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    from ._attention import attend, takes

    kernels: Any = sys.modules["libreyolo.kernels"]
    if not all(hasattr(kernels, name) for name in _REGISTRY):
        bridge.warn(module, f"register: libreyolo.kernels lacks at least one of {', '.join(_REGISTRY)}")
        return

    def ms_deform_attn(
        value: Any, spatial_shapes: Any, sampling_locations: Any, attention_weights: Any
    ) -> Any:
        if not takes(value):
            return None
        return attend(value, spatial_shapes, sampling_locations, attention_weights)

    def forget() -> None:
        kernels.unregister(_SLOT, _NAME)
        kernels.clear_cache()

    kernels.register(_SLOT, ms_deform_attn, name=_NAME)
    kernels.clear_cache()  # register() clears only a choice that was cached under another key.
    bridge.at_uninstall(forget)
    yield f"kernels.register({_SLOT!r})"


bridge = Bridge("libreyolo", "libreyolo", r"libreyolo\.kernels\.attention\.ms_deform_attn", _patch)
install, uninstall, installed, patched = bridge.functions
