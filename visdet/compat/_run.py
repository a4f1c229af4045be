"""Programs that run with bridges: how one is started, and what it tells at its end."""

import atexit
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import TracebackType
from typing import NoReturn

__all__ = ["STARTUP", "become", "begin"]

STARTUP = str(Path(__file__).resolve().parent / "startup")
_TELLER = "VISDET_COMPAT_TELLER"  # the number of the process that tells at its end what it has called


def become(names: list[str], program: list[str]) -> NoReturn:
    """Become a Python process of a script or of a module after ``-m``, with the arguments that follow it.

    Environment variables install the bridges in it, and in every Python process that it starts.
    """
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    entries = [entry for entry in before if entry not in ("", STARTUP)]
    # Python has put the current folder in the first place, because of the option -m of visdet's own command.
    if (
        PathFinder.find_spec("visdet", [place for place in sys.path if place not in ("", os.getcwd())])
        is None
    ):
        entries.append(str(Path(__file__).resolve().parents[2]))
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *entries])
    os.environ["VISDET_COMPAT"] = ",".join(names)
    os.environ[_TELLER] = str(os.getpid())
    given = sys.orig_argv[1:]
    options = given[: given.index("-m")] if "-m" in given else []
    os.execv(sys.executable, [sys.executable, *options, *program])


def begin() -> None:
    """Let this process tell at its end what it has called, and name an extension that is missing with advice."""
    before = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from .extensions import missing_extension

        if isinstance(error, ImportError) and (name := missing_extension(error)):
            error.msg += (
                f". visdet does not provide the compiled extension {name}: it has to be compiled from its sources "
                "for the installed torch. `python -m visdet.compat` lists those that visdet provides"
            )
        atexit.unregister(_tell)  # The error is the last that is read.
        before(kind, error, trace)

    sys.excepthook = explain
    atexit.register(_tell)


def _tell() -> None:
    """Tell, in the first process, which of visdet's operators the program has called. Without torch, it has none."""
    is_first = os.environ.get(_TELLER) == str(os.getpid()) and os.environ.get("RANK", "0") == "0"
    if is_first and "torch" in sys.modules:
        from ._counts import summary

        print(summary(), file=sys.stderr)
