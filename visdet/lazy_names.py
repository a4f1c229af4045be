"""Packages that import each of their modules when one of its names is first used (PEP 562).

A program then imports only what it uses. To print a config, for instance, it needs no torch.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from .near_names import unknown_attribute

__all__ = ["lazy_names"]


def lazy_names(
    package: str, module_of: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__all__``, the ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: the ``__name__`` of the package.
        module_of: for each public name the module of the package that defines it, such as ``config.load``. A module
            outside the package has its whole name, such as ``visdet.option_values``. A module that is itself public has
            its own name.
    """

    def get_attribute(name: str) -> Any:
        module = module_of.get(name, name)
        if module not in module_of.values():
            raise unknown_attribute(package, name, module_of)
        loaded = importlib.import_module(module if module.startswith("visdet.") else f"{package}.{module}")
        return loaded if module == name else getattr(loaded, name)

    return sorted(module_of), get_attribute, lambda: sorted(module_of)
