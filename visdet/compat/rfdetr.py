"""The bridge to RF-DETR (package ``rfdetr``), which replaces its deformable attention by visdet's.

A model that has been prepared for export keeps its own implementation.
"""

from collections.abc import Iterator
from types import ModuleType

from ._bridge import Bridge, CompatWarning

__all__ = ["CompatWarning", "install", "installed", "patched", "uninstall"]


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    from ._operators import channels_first_function, replace_function

    name = "ms_deform_attn_core_pytorch"
    return replace_function(module, bridge, name, channels_first_function, "channels first")


bridge = Bridge("rfdetr", "rfdetr", r"rfdetr\.models\.ops\.modules\.ms_deform_attn", _patch)
install, uninstall, installed, patched = bridge.functions
