"""Functions that run a script or a module as ``python`` does, and pass bridges on to child processes."""

import os
import runpy
import sys
from pathlib import Path

__all__ = ["run_program", "share_with_children"]

_STARTUP = str(Path(__file__).resolve().parent / "startup")


def run_program(arguments: list[str]) -> None:
    """Run a script, or a module after ``-m``, with the arguments that follow it, as the main program."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    if not Path(arguments[0]).exists():
        print(f"can't run {arguments[0]!r}: there is no such file", file=sys.stderr)
        sys.exit(2)
    sys.argv = arguments
    # Python has put the current folder in the first place, because of the option -m of visdet's own command.
    if sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


def share_with_children(names: list[str]) -> None:
    """Set environment variables that install these bridges in every Python process that this process starts."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join([_STARTUP, *(entry for entry in entries if entry != _STARTUP)])
    os.environ["VISDET_COMPAT"] = ",".join(names)
