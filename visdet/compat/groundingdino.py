"""The bridge to GroundingDINO, which replaces its deformable attention by visdet's.

GroundingDINO may be installed as ``groundingdino-py`` or ``rf-groundingdino``, or from its repository. If the extension
``groundingdino._C`` of the repository has not been compiled, the bridge provides that module, too.
"""

import inspect
from collections.abc import Iterator
from types import ModuleType

from ._bridge import Bridge, CompatWarning

__all__ = ["CompatWarning", "install", "installed", "patched", "uninstall"]

_MODULE = "groundingdino.models.GroundingDINO.ms_deform_attn"
_FUNCTION = "multi_scale_deformable_attn_pytorch"
_PARAMETERS = ("value", "value_spatial_shapes", "sampling_locations", "attention_weights")


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    from . import msda_ext
    from ._attention import disagreement
    from ._operators import function

    original = vars(module).get(_FUNCTION)
    if original is None or tuple(inspect.signature(original).parameters) != _PARAMETERS:
        bridge.warn(module, f"{_FUNCTION} is missing, or its arguments are not {_PARAMETERS}")
        return

    attention = function(original)
    problem = disagreement(attention, original, "levels")
    if problem:
        bridge.warn(module, f"{_FUNCTION} {problem}")
        return
    bridge.replace(module, _FUNCTION, attention)
    yield _FUNCTION
    if hasattr(module, "MultiScaleDeformableAttnFunction") and not hasattr(module, "_C"):
        bridge.replace(module, "_C", msda_ext)
        yield "_C"


bridge = Bridge(
    "groundingdino", "groundingdino", lambda name: name == _MODULE, _patch, distribution="groundingdino-py"
)
install, uninstall, installed = bridge.install, bridge.uninstall, bridge.installed
patched = bridge.patched
