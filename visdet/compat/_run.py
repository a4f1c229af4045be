"""Functions that run a script or a module as ``python`` does, and pass bridges on to child processes."""

import builtins
import io
import os
import pkgutil
import runpy
import sys
import zipfile
from pathlib import Path
from types import ModuleType

__all__ = ["run_program", "share_with_children"]

_earlier: list[ModuleType] = []  # main modules whose functions still run
_STARTUP = str(Path(__file__).resolve().parent / "startup")


def run_program(arguments: list[str]) -> None:
    """Run a script, or a module after ``-m``, with the arguments that follow it, as the main program."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        _become_main()
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    if not Path(arguments[0]).exists():
        print(f"can't run {arguments[0]!r}: there is no such file", file=sys.stderr)
        sys.exit(2)
    sys.argv = arguments
    # Python has put the current folder in the first place, because of the option -m of visdet's own command.
    if sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    path = os.path.abspath(arguments[0])
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # of a compiled file
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    namespace = vars(_become_main())
    namespace["__file__"] = path
    exec(code, namespace)


def _become_main() -> ModuleType:
    """Return a new main module, which stays until the process ends, as threads and exit handlers may need it."""
    _earlier.append(sys.modules["__main__"])
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def share_with_children(names: list[str]) -> None:
    """Set environment variables that install these bridges in every Python process that this process starts."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join([_STARTUP, *(entry for entry in entries if entry != _STARTUP)])
    os.environ["VISDET_COMPAT"] = ",".join(names)
