"""Functions that run a script or a module as ``python`` does, and pass bridges on to child processes."""

import builtins
import importlib.util
import io
import os
import sys
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

__all__ = ["run_program", "share_with_children"]

_earlier: list[ModuleType] = []  # main modules whose functions still run
_STARTUP = str(Path(__file__).resolve().parent / "startup")


def run_program(arguments: list[str]) -> None:
    """Run a script, or a module after ``-m``, with the arguments that follow it, as the main program."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        spec, code = _find(arguments[1])
        sys.argv[0] = str(spec.origin)
        main = vars(_become_main())
        main |= {"__spec__": spec, "__loader__": spec.loader, "__package__": spec.parent}
        main |= {"__file__": spec.origin, "__cached__": spec.cached}
        exec(code, main)
        return
    if not Path(arguments[0]).is_file():
        print(f"can't run {arguments[0]!r}: there is no such file", file=sys.stderr)
        sys.exit(2)
    sys.argv = arguments
    # Python has put the current folder in the first place, because of the option -m of visdet's own command.
    if sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    path = os.path.abspath(arguments[0])
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    namespace = vars(_become_main())
    namespace["__file__"] = path
    exec(code, namespace)


def _find(name: str) -> tuple[ModuleSpec, CodeType]:
    """Return what ``python -m`` runs for a module, or for a package its ``__main__``. End the process without any."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # A parent package of the module imports what is not installed.
        spec = None
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        print(
            f"can't run -m {name}: there is no such module, or it is a package without __main__",
            file=sys.stderr,
        )
        sys.exit(1)
    return spec, code


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
