"""Functions that tell an attention module of ``transformers`` whether its model was asked for attention weights.

Most families of models record attentions by hooks, and a context variable of ``transformers`` tells what is recorded.
Others (Grounding DINO, Mask2Former, OneFormer) collect the results of their layers. The forwards of those models are
wrapped, so that they note whether attentions were asked for.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch

__all__ = ["asking_models", "is_asked", "is_read", "noting_forward", "source_of"]

_OPTION = "output_attentions"
_noted: ContextVar[bool | None] = ContextVar("visdet_output_attentions", default=None)


def asking_models(module: ModuleType) -> list[type]:
    """Return the model classes that a module defines and whose forwards take ``output_attentions``."""
    found = []
    for owner in vars(module).values():
        if (
            not isinstance(owner, type)
            or owner.__module__ != module.__name__
            or not hasattr(owner, "config_class")
        ):
            continue
        forward = vars(owner).get("forward")
        if forward is not None and _OPTION in inspect.signature(forward).parameters:
            found.append(owner)
    return found


def noting_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that notes, while it runs, whether it or an enclosing model was asked for attentions.

    A hook of any part of the model asks for them, too, because the layers return them.
    """
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        option = dict(zip(names, args, strict=False)).get(_OPTION, kwargs.get(_OPTION))
        asked = bool(getattr(self.config, _OPTION, False) if option is None else option)
        outer = _noted.get()
        asked = asked or (any(map(is_read, self.modules())) if outer is None else outer)
        token = _noted.set(asked)
        try:
            return original(self, *args, **kwargs)
        finally:
            _noted.reset(token)

    return forward


def is_read(module: Any) -> bool:
    """Return whether a hook may read the attention weights in a module's result.

    The hooks by which ``transformers`` records outputs stay after their first use. ``is_asked`` tells what they need.
    Those of ``torch.distributed`` (FSDP) read nothing.
    """
    hooks = vars(module)["_forward_hooks"]
    return bool(hooks) and any(
        not source_of(hook).startswith(("transformers.", "torch.distributed.")) for hook in hooks.values()
    )


def source_of(function: Any) -> str:
    """Return the name of the module in which a function was written. A wrapper has a module of its own."""
    written_in = getattr(function, "__globals__", {}).get("__name__")
    return written_in or getattr(function, "__module__", None) or ""


def is_asked() -> bool:
    """Return whether attention weights may be read, because a model was asked for them or no model is running."""
    if _noted.get() is not None:
        return bool(_noted.get())
    collector = _collector()
    recorded = None if collector is None else collector.get()
    return recorded is None or any("attention" in key for key in recorded)


@functools.cache
def _collector() -> Any:
    """Return the context variable in which ``transformers`` keeps what it records, or None in versions without it."""
    try:
        from transformers.utils import output_capturing
    except ImportError:
        return None
    return getattr(output_capturing, "_active_collector", None)
