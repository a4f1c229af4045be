"""The bridge to ultralytics, which replaces the deformable attention of its RT-DETR by visdet's.

Exports keep the package's own implementation.
"""

from collections.abc import Iterator
from types import ModuleType

from ._bridge import Bridge, CompatWarning

__all__ = ["CompatWarning", "install", "installed", "patched", "uninstall"]


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    from ._operators import function, replace_function

    # The points of all levels stand in one dimension from version 8.4 on.
    name = "multi_scale_deformable_attn_pytorch"
    return replace_function(module, bridge, name, function, "folded", "levels")


bridge = Bridge("ultralytics", "ultralytics", r"ultralytics\.nn\.modules\.transformer", _patch)
install, uninstall, installed, patched = bridge.functions
