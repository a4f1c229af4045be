"""A replacement of ``mmcv._ext`` by visdet's operators, with which mmdet runs on mmcv-lite without a compiler.

``python -m visdet.compat run tools/train.py CONFIG`` runs a script with this replacement and all bridges, and
``python -m visdet.compat.mmcv_ops`` in place of it with this replacement alone. A program calls ``install()`` before it
imports ``mmcv.ops``. With ``VISDET_MMCV_OPS=1`` in the environment, importing visdet or any
part of it calls ``install()``.
"""

import importlib.machinery
import importlib.util
import sys

from visdet.errors import MissingPackageError

from ._run import run_program
from .extensions import Extensions, provided

__all__ = ["install", "main"]

_USAGE = "usage: python -m visdet.compat.mmcv_ops SCRIPT|-m MODULE [ARGUMENTS]"
_HELP = f"""{_USAGE}

Run a script, or a module, with mmcv-lite on visdet's operators: mmcv._ext, the compiled part of mmcv, is visdet's.
If the installed mmcv has a compiled _ext of its own, that one is kept."""


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


def main(arguments: list[str] | None = None) -> int:
    """Call ``install()``, and run a script, or a module after ``-m``, with the arguments that follow it.

    Args:
        arguments: the arguments of the command. The default is those of this process.

    Returns:
        the exit status, which is 2 if there is no script and no module.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["-h"], ["--help"]):
        print(_HELP)
        return 0
    if not arguments or arguments == ["-m"]:
        print(_USAGE, file=sys.stderr)
        return 2
    try:
        install()
    except MissingPackageError as error:
        sys.exit(str(error))
    run_program(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
