"""The bridge to the detectors of ``transformers``, which replaces their deformable attention by visdet's.

``install()`` replaces the operator in every family of models whose ``modeling_*.py`` defines it. The definition is a
class ``MultiScaleDeformableAttention``, or a function ``multi_scale_deformable_attention`` or
``multi_scale_deformable_attention_v2``. Before a definition is replaced, it is compared with visdet's operator on a
small example. This also serves models that were built before ``install()``. Parameters and state dicts do not change.
Traces, exports and ``method="discrete"`` keep the package's own implementation.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ._bridge import Bridge, CompatWarning

__all__ = ["CompatWarning", "install", "installed", "patched", "uninstall"]

_MODELING = re.compile(r"transformers\.models\.\w+\.modeling_\w+")
_CLASS, _FUNCTION, _RAGGED = (
    "MultiScaleDeformableAttention",
    "multi_scale_deformable_attention",
    "multi_scale_deformable_attention_v2",
)
_BOUND = "ms_deformable_attn_core"  # D-FINE's constructor keeps the function in this attribute.
_PARAMETERS = {
    _CLASS: (
        "self",
        "value",
        "value_spatial_shapes",
        "value_spatial_shapes_list",
        "level_start_index",
        "sampling_locations",
        "attention_weights",
        "im2col_step",
    ),
    _FUNCTION: ("value", "value_spatial_shapes", "sampling_locations", "attention_weights"),
    _RAGGED: (
        "value",
        "value_spatial_shapes",
        "sampling_locations",
        "attention_weights",
        "num_points_list",
        "method",
    ),
}


def _patch(module: ModuleType, bridge: Bridge) -> Iterator[str]:
    if not any(hasattr(module, name) for name in _PARAMETERS):
        return
    from . import _fused_attention, _operators

    forms = {
        owner: _fused_attention.find_form(owner, module)
        for owner in _fused_attention.attention_classes(module)
    }
    # Each replacement: the class or module, the name in it, and the new function.
    operators: list[tuple[Any, str, Any]] = []
    for name, replacement_of in (
        (_CLASS, _operators.class_forward),
        (_FUNCTION, _operators.function),
        (_RAGGED, _operators.ragged_function),
    ):
        owned = vars(module).get(name)
        if owned is None:
            continue
        original = vars(owned).get("forward") if name == _CLASS else owned
        if _is_foreign(original):
            bridge.warn(module, f"{name} was wrapped or replaced by another package or program")
            return
        if owned.__module__ != module.__name__:
            continue
        if not _is_known(module, name, original, replacement_of):
            return
        replacement = replacement_of(original)
        binding = [owner for owner, form in forms.items() if name == _RAGGED and form and form.keeps_operator]
        placed: list[tuple[Any, str, Any]] = [
            (owner, _BOUND, _operators.BoundFunction(_BOUND, original, replacement)) for owner in binding
        ]
        if name == _CLASS:
            placed.append((owned, "forward", replacement))
        elif not binding:
            # A function that instances store must stay in its module, where pickle looks for it.
            placed.append((module, name, replacement))
        for place in placed:
            bridge.replace(*place)
        operators += placed
        yield name
    for owner, form in forms.items():
        if _is_foreign(vars(owner)["forward"]):
            bridge.warn(
                module, f"{owner.__name__}.forward was wrapped or replaced by another package or program"
            )
            continue
        if form is None:
            bridge.warn(
                module, f"{owner.__name__}.forward computes something else than visdet's fused operator"
            )
            continue
        uses_visdet = _user_of_operators(
            [place for place in operators if place[1] != _BOUND or place[0] is owner]
        )
        bridge.replace(
            owner, "forward", _fused_attention.fused_forward(vars(owner)["forward"], form, uses_visdet)
        )
        yield f"{owner.__name__}.forward, fused"


def _user_of_operators(operators: list[tuple[Any, str, Any]]) -> Callable[[Any], bool]:
    """Return a function that tells whether an attention module would call visdet's operator.

    It does not where somebody has replaced the operator since, in the package or in this instance.
    """
    kinds = {holder for holder, attribute, _ in operators if attribute == "forward"}

    def uses_visdet(instance: Any) -> bool:
        core = getattr(instance, "attn", None)
        if core is not None and type(core) not in kinds:
            return False
        for holder, attribute, value in operators:
            if vars(holder).get(attribute) is not value:
                return False
            if attribute == _BOUND and vars(instance).get(_BOUND, value.original) is not value.original:
                return False
        return True

    return uses_visdet


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


def _is_known(
    module: ModuleType,
    name: str,
    original: Callable[..., Any] | None,
    replacement_of: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> bool:
    """Return whether a definition of the operator agrees with visdet's, and warn if it does not.

    Args:
        module: the module with the definition.
        name: the name of the class or the function.
        original: the function, or the forward of the class. None if the class has no forward.
        replacement_of: a function that returns visdet's replacement of ``original``.
    """
    from ._attention import disagreement

    found = tuple(inspect.signature(original).parameters) if original is not None else ()
    if original is None or found != _PARAMETERS[name]:
        bridge.warn(module, f"{name} takes {found}, where {_PARAMETERS[name]} was expected")
        return False
    functions = replacement_of(original), original
    if name == _CLASS:
        functions = _as_function(functions[0]), _as_function(functions[1])
    problem = disagreement(*functions, "ragged" if name == _RAGGED else "levels")
    if problem:
        bridge.warn(module, f"{name} {problem}")
    return not problem


def _as_function(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of the class as a function with the arguments of the other definitions.

    The forward does not use its instance, so that None takes its place.
    """
    return lambda value, shapes, *rest: forward(None, value, shapes, shapes.tolist(), None, *rest, 64)


bridge = Bridge(
    "transformers",
    "transformers",
    lambda name: _MODELING.fullmatch(name) is not None,
    _patch,
)
install, uninstall, installed = bridge.install, bridge.uninstall, bridge.installed
patched = bridge.patched
