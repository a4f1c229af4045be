"""A replacement of ``mmcv._ext`` by visdet's operators, with which mmdet runs on mmcv-lite without a compiler.

``python -m visdet.compat run tools/train.py CONFIG`` runs a script with this replacement and all bridges, and
``python -m visdet.compat.mmcv_ops`` in place of it with the bridge ``extensions`` alone. A program calls ``install()``
before it imports ``mmcv.ops``. With ``VISDET_MMCV_OPS=1`` in the environment, importing visdet or any part of it calls
``install()``.
"""

import importlib.machinery
import importlib.util
import sys

from visdet.errors import MissingPackageError

from .extensions import Extensions, provided

__all__ = ["install"]


def install() -> bool:
    """Make ``mmcv._ext`` importable, and return whether visdet provides it.

    If the installed mmcv has a compiled ``_ext``, that one is kept, and the result is False. A second call changes
    nothing.

    Raises:
        MissingPackageError: mmcv is not installed. This is an ImportError, too.
    """
    if "mmcv._ext" in sys.modules:
        return "mmcv._ext" in provided()
    spec = importlib.util.find_spec("mmcv")
    if spec is None or spec.submodule_search_locations is None:
        raise MissingPackageError(
            "visdet.compat.mmcv_ops: mmcv is not installed. Install it with `pip install mmcv-lite==2.1.0`, or unset "
            "VISDET_MMCV_OPS"
        )
    if importlib.machinery.PathFinder.find_spec("mmcv._ext", spec.submodule_search_locations):
        return False
    _finder.watch()
    return True


_finder = Extensions("mmcv._ext")


if __name__ == "__main__":
    from visdet.compat.__main__ import main

    sys.exit(main(["run", "--only", "extensions", *sys.argv[1:]]))
