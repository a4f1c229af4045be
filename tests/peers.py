"""Packages whose numbers visdet's must equal: their tests are skipped without them, or fail where they must run."""

import importlib
import os

import pytest


def peer(module: str, package: str, target: str) -> None:
    """Skip the rest of a test file unless ``module`` imports; under ``make TARGET``, which installs it, it must.

    Args:
        module: what the file imports of the package.
        package: the name of the package, for the reason.
        target: the target of the Makefile that installs the package and sets ``VISDET_CHECK=TARGET``.
    """
    if os.environ.get("VISDET_CHECK") == target:
        importlib.import_module(module)
    else:
        pytest.importorskip(module, reason=f"{package} is not installed: make {target}", exc_type=ImportError)
