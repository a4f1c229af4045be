"""Registration of modules in mmengine's root registry, where configs of other packages expect them."""

from importlib.util import find_spec

from mmengine.registry import MODELS as ROOT_MODELS
from torch import nn


def register_in_root(module_class: type[nn.Module], name: str | None = None) -> type[nn.Module]:
    """Register a class in mmengine's root ``MODELS``, where mmcv 2 has a class of this name, and return the class.

    Configs of any scope can then use the name without a prefix. If mmcv is installed, nothing is registered, because
    mmcv fails if one of its names is taken.

    Args:
        module_class: the class.
        name: the name. The default is the name of the class.
    """
    name = name or module_class.__name__
    if name not in ROOT_MODELS.module_dict and find_spec("mmcv") is None:
        ROOT_MODELS.register_module(name, module=module_class)
    return module_class
