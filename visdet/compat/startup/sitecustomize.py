"""Installs the bridges that VISDET_COMPAT lists when Python starts with this folder on PYTHONPATH."""

import importlib.machinery
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _run_the_other_one() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    path = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_other_one()
if os.environ.get("VISDET_COMPAT"):
    try:
        from visdet import compat
        from visdet.compat._run import begin
    except ModuleNotFoundError as error:
        # A script may have started another Python environment, which lacks visdet.
        if error.name != "visdet":
            raise
    else:
        compat.watch()
        begin()
