"""The bridge to GroundingDINO, which replaces its deformable attention by visdet's.

GroundingDINO may be installed as ``groundingdino-py`` or ``rf-groundingdino``, or from its repository. If the extension
``groundingdino._C`` of the repository has not been compiled, the bridge provides that module, too.
"""

from collections.abc import Iterator
from types import ModuleType

from ._bridge import Bridge, CompatWarning

__all__ = ["CompatWarning", "install", "installed", "patched", "uninstall"]

_MODULE = r"groundingdino\.models\.GroundingDINO\.ms_deform_attn"


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    from ._operators import function, replace_function

    yield from replace_function(module, bridge, "multi_scale_deformable_attn_pytorch", function, "levels")
    if hasattr(module, "MultiScaleDeformableAttnFunction") and not hasattr(module, "_C"):
        from . import msda_ext

        bridge.replace(module, "_C", msda_ext)
        yield "_C"


bridge = Bridge("groundingdino", "groundingdino", _MODULE, _patch, distribution="groundingdino-py")
install, uninstall, installed, patched = bridge.functions
