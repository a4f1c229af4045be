"""Bridges to other packages. A bridge replaces a package's operators by visdet's, or provides its missing extension.

``visdet.compat.<bridge>.install()`` installs a bridge in a program. ``python -m visdet.compat run SCRIPT`` runs an
unmodified script with bridges, and ``python -m visdet.compat`` lists them. A bridge is imported only when it is used.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any

__all__ = ["BRIDGES", "find", "names_in", "watch"]

BRIDGES = (
    "transformers",
    "ultralytics",
    "rtdetr",
    "rfdetr",
    "groundingdino",
    "libreyolo",
    "extensions",
    "older_versions",
)


def find(name: str) -> Any:
    """Return the bridge of this name, an object with ``install``, ``uninstall``, ``watch`` and ``is_installed``.

    Raises:
        ValueError: there is no such bridge.
    """
    if name not in BRIDGES:
        raise ValueError(f"visdet.compat: there is no bridge {name!r}. The bridges are {', '.join(BRIDGES)}")
    return importlib.import_module(f"{__name__}.{name}").bridge


def names_in(text: str) -> list[str]:
    """Return the names in a text, which commas separate."""
    return text.replace(",", " ").split()


def watch(names: Sequence[str] | None = None) -> list[str]:
    """Install bridges as soon as their packages are imported, and return the names of the bridges.

    This imports neither torch nor the packages. A package that is not installed is not an error.

    Args:
        names: the names of the bridges. "all" stands for all bridges. The default is the list of names, separated by
            commas, in the environment variable VISDET_COMPAT.

    Raises:
        ValueError: there is no bridge of one of the names.
    """
    if names is None:
        names = names_in(os.environ.get("VISDET_COMPAT", ""))
    chosen = list(BRIDGES if "all" in names else names)
    for name in chosen:
        find(name).watch()
    return chosen
