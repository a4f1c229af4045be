"""The bridge to the sources of RT-DETR, D-FINE and DEIM, which replaces their deformable attention by visdet's.

They define it in plain torch, in a module ``src.zoo.<model>.utils`` or ``engine.<model>.utils``, as
``deformable_attention_core_func`` or ``deformable_attention_core_func_v2``. Other modules import the function from
there, so that the bridge must be installed before the sources are imported. Exports keep their own implementation.
"""

from collections.abc import Iterator
from types import ModuleType

from ._bridge import Bridge, CompatWarning

__all__ = ["CompatWarning", "install", "installed", "patched", "uninstall"]


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    from ._operators import function, ragged_function, replace_function

    name = "deformable_attention_core_func"
    if hasattr(module, name):
        yield from replace_function(module, bridge, name, function, "levels")
    if hasattr(module, f"{name}_v2"):
        yield from replace_function(module, bridge, f"{name}_v2", ragged_function, "ragged", "listed")


bridge = Bridge(
    "rtdetr",
    "torch",
    r"(?:src\.zoo|engine)\.\w+\.utils",
    _patch,
    distribution="RT-DETR",
)
install, uninstall, installed, patched = bridge.functions
