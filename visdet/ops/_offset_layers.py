"""Renames the offset layers of version 1 of deformable convolutions, whichever loader brings them."""

from typing import Any

from torch import nn

__all__ = ["rename_offset_layer"]


def rename_offset_layer(state_dict: dict, prefix: str, *_: Any) -> None:
    """Rename in place: before version 2 the offset layer stood beside its convolution, as ``<name>_offset``."""
    for name in ("weight", "bias"):
        old, new = f"{prefix[:-1]}_offset.{name}", f"{prefix}conv_offset.{name}"
        if new not in state_dict and old in state_dict:
            state_dict[new] = state_dict.pop(old)


def _rename_offset_layers(module: nn.Module, state_dict: dict, prefix: str, *_: Any) -> None:
    for name, child in module.named_children():
        if getattr(type(child), "has_offset_layer", False):
            rename_offset_layer(state_dict, f"{prefix}{name}.")


def _watch_parents(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Let the parent of a pack rename: loaders hand a child only the entries under its own name."""
    if getattr(type(child), "has_offset_layer", False) and "_renames_offset_layers" not in module.__dict__:
        module.register_load_state_dict_pre_hook(_rename_offset_layers)
        module.__dict__["_renames_offset_layers"] = (
            True  # wrappers forward attributes, their __dict__ is their own
        )


nn.modules.module.register_module_module_registration_hook(_watch_parents)
