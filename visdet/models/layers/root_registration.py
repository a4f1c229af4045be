"""Names other frameworks' configs expect in mmengine's root registry."""

from importlib.util import find_spec

from mmengine.registry import MODELS as ROOT_MODELS
from torch import nn

__all__ = ["register_in_root"]


def register_in_root(module_class: type[nn.Module], name: str | None = None) -> type[nn.Module]:
    """Register a class in mmengine's root ``MODELS`` too, under its own name or another, where mmcv 2 has it.

    Bare names of configs then work in any scope.

    Where mmcv is installed the root name is left to it: mmcv registers without asking and fails on a taken name.
    """
    name = name or module_class.__name__
    if name not in ROOT_MODELS.module_dict and find_spec("mmcv") is None:
        ROOT_MODELS.register_module(name, module=module_class)
    return module_class
