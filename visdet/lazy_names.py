"""Packages that import each of their modules when one of its names is first used (PEP 562).

A program then imports only what it uses. To print a config, for instance, it needs no torch.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .near_names import unknown_attribute

__all__ = ["lazy_names"]


def lazy_names(
    package: str, names_of: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__all__``, the ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: the ``__name__`` of the package.
        names_of: the public names that each module of the package defines, such as ``config.load``. A module outside
            the package has its whole name, such as ``visdet.option_values``. A module without names is itself public.
    """
    module_of = {name: module for module, names in names_of.items() for name in names or [module]}

    def get_attribute(name: str) -> Any:
        if name in names_of:
            return importlib.import_module(f"{package}.{name}")
        if name in module_of:
            module = module_of[name]
            path = module if module.startswith("visdet.") else f"{package}.{module}"
            return getattr(importlib.import_module(path), name)
        raise unknown_attribute(package, name, module_of)

    return sorted(module_of), get_attribute, lambda: sorted(module_of)
