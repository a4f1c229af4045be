"""Bridges to other packages, which replace their operators, or the compiled extensions that they lack, by visdet's.

``visdet.compat.<bridge>.install()`` installs a bridge in a program. ``python -m visdet.compat run SCRIPT`` runs an
unmodified script with bridges, and ``python -m visdet.compat`` lists them. A bridge is imported only when it is used.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any

__all__ = ["BRIDGES", "find", "watch"]

BRIDGES = ("transformers", "ultralytics", "rfdetr", "groundingdino", "libreyolo", "extensions")


def find(name: str) -> Any:
    """Return the bridge of this name, an object with ``install``, ``uninstall``, ``watch`` and ``is_installed``.

    Raises:
        ValueError: there is no such bridge.
    """
    if name not in BRIDGES:
        raise ValueError(f"visdet.compat: there is no bridge {name!r}; there are {', '.join(BRIDGES)}")
    return importlib.import_module(f"{__name__}.{name}").bridge


def watch(names: Sequence[str] | None = None) -> list[str]:
    """Install bridges as soon as their packages are imported, and return their names.

    This imports neither torch nor the packages. A package that is not installed is not an error.

    Args:
        names: the names of the bridges. The default is the list in the environment variable VISDET_COMPAT, separated by
            commas. "all" stands for all bridges.
    """
    if names is None:
        names = [name.strip() for name in os.environ.get("VISDET_COMPAT", "").split(",") if name.strip()]
    chosen = list(BRIDGES) if "all" in names else list(names)
    for name in chosen:
        find(name).watch()
    return chosen
