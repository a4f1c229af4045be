"""Bridges to other packages: their operators, or compiled extensions that they miss, replaced by visdet's.

``visdet.compat.<bridge>.install()`` does so in a program; ``python -m visdet.compat run SCRIPT`` for a script that
knows nothing of visdet; ``python -m visdet.compat`` lists the bridges. Nothing of them is imported unless asked for.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any

__all__ = ["BRIDGES", "find", "watch"]

BRIDGES = ("transformers", "ultralytics", "rfdetr", "groundingdino", "libreyolo", "extensions")


def find(name: str) -> Any:
    """Return a bridge by its name: an object with ``install``, ``uninstall``, ``watch`` and ``is_installed``."""
    if name not in BRIDGES:
        raise ValueError(f"visdet.compat: there is no bridge {name!r}; there are {', '.join(BRIDGES)}")
    return importlib.import_module(f"{__name__}.{name}").bridge


def watch(names: Sequence[str] | None = None) -> list[str]:
    """Install bridges as soon as their packages are imported; return their names.

    Without ``names``, those that VISDET_COMPAT lists, separated by commas; "all" stands for every one. No package and
    no torch is imported, and a package that is not installed is no error.
    """
    if names is None:
        names = [name.strip() for name in os.environ.get("VISDET_COMPAT", "").split(",") if name.strip()]
    chosen = list(BRIDGES) if "all" in names else list(names)
    for name in chosen:
        find(name).watch()
    return chosen
