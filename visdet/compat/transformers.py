"""The bridge to the detectors of ``transformers``, which replaces their deformable attention by visdet's.

``install()`` replaces the operator in every family of models whose ``modeling_*.py`` defines it. The definition is a
class ``MultiScaleDeformableAttention``, or a function ``multi_scale_deformable_attention`` or
``multi_scale_deformable_attention_v2``. Before a definition is replaced, it is compared with visdet's operator on a
small example. This also serves models that were built before ``install()``. Parameters and state dicts do not change.
Traces, exports and ``method="discrete"`` keep the package's own implementation.
"""

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ._bridge import Bridge, CompatWarning

__all__ = ["CompatWarning", "install", "installed", "patched", "uninstall"]

# For each definition, the function of ``_operators`` that makes the replacement, and the layout of its arguments.
_CLASS, _RAGGED = "MultiScaleDeformableAttention", "multi_scale_deformable_attention_v2"
_FORMS = {
    _CLASS: ("class_forward", "class"),
    "multi_scale_deformable_attention": ("function", "levels"),
    _RAGGED: ("ragged_function", "ragged"),
}
_BOUND = "ms_deformable_attn_core"  # D-FINE's constructor keeps the function in this attribute.


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    for name in filter(vars(module).get, _FORMS):
        from . import _attention, _operators

        owned = vars(module)[name]
        original = vars(owned).get("forward") if name == _CLASS else owned
        if _is_foreign(original):
            bridge.warn(module, f"{name} was wrapped or replaced by another package or program")
            continue
        form, layout = _FORMS[name]
        replacement = getattr(_operators, form)(original)
        if owned.__module__ != module.__name__ or not _attention.is_known(
            bridge, module, name, original, replacement, layout
        ):
            continue
        keepers = list(_keepers(module, bridge)) if name == _RAGGED else []
        for owner in keepers:
            bridge.replace(owner, _BOUND, _operators.BoundFunction(_BOUND, original, replacement))
        if name == _CLASS:
            bridge.replace(owned, "forward", replacement)
        elif not keepers:
            # A function that instances store must stay in its module, where pickle looks for it.
            bridge.replace(module, name, replacement)
        yield name


def _keepers(module: ModuleType, bridge: Bridge) -> Iterator[type]:
    """Yield the classes of attention modules whose instances keep the operator's function in an attribute."""
    import torch

    for name, owner in vars(module).items():
        if name.endswith("DeformableAttention"):
            config, *_ = inspect.signature(owner).parameters.values()
            try:
                with torch.device("meta"):  # It draws no random numbers.
                    keeps = _BOUND in vars(owner(config.annotation()))
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                bridge.warn(module, f"{name} is not made from a config alone ({error})")
                keeps = True
            if keeps:
                yield owner


def _is_foreign(function: Any) -> bool:
    """Return whether a function, or a wrapper of it, is not the package's own and has to be called as before."""
    while function is not None:
        written_in = getattr(function, "__globals__", {}).get("__name__") or getattr(
            function, "__module__", ""
        )
        if not str(written_in).startswith("transformers."):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


bridge = Bridge(
    "transformers",
    "transformers",
    r"transformers\.models\.\w+\.modeling_\w+",
    _patch,
)
install, uninstall, installed, patched = bridge.functions
