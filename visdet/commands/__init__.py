"""The program ``visdet``. Each module here is a command."""

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from signal import SIG_DFL, SIGPIPE, signal
from types import ModuleType
from typing import Any

import visdet
from visdet.command_line import check_installation, prepare_process, sort_names
from visdet.near_names import did_you_mean

__all__ = ["main"]

# The module of each command. Its docstring is the description, and it has ``add_arguments``, and ``run``, whose
# arguments they are.
_MODULES = {
    "train": "visdet.commands.train",
    "test": "visdet.commands.test",
    "infer": "visdet.commands.infer",
    "export": "visdet.commands.export",
    "check-export": "visdet.commands.check_export",
    "inspect": "visdet.commands.inspect",
    "benchmark": "visdet.commands.benchmark",
    "configs": "visdet.commands.configs",
    "print-config": "visdet.commands.print_config",
    "convert": "visdet.commands.convert",
    "check-data": "visdet.commands.check_data",
    "browse": "visdet.commands.browse",
    "compare": "visdet.commands.compare",
    "curves": "visdet.commands.curves",
    "visualize-driving": "visdet.commands.visualize_driving",
    "make-shapes": "visdet.commands.make_shapes",
    "make-driving-scenes": "visdet.commands.make_driving_scenes",
    "make-anchors": "visdet.commands.make_anchors",
    "prepare-nuscenes": "visdet.commands.prepare_nuscenes",
    "doctor": "visdet.doctor",
}
_PRINTING = ("compare", "configs", "print-config", "inspect", "doctor")
_DESCRIPTION = """Train, evaluate and use detectors that config files describe.

First steps, in any folder:
  visdet configs                                           # the configs of the package
  visdet train deformable_detr/deformable-detr_shapes      # on images that are drawn first
  visdet infer work_dirs/.../best.pth IMAGE|VIDEO|FOLDER ...    # detections in your own images

A CONFIG is a file of yours, or the name of one of the package's configs. A checkpoint holds its config.
`visdet COMMAND --help` explains a command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program ``visdet``.

    Args:
        arguments: a command and its arguments. The default is those of the process.
    """
    prepare_process()
    modules = {name: import_module(path) for name, path in _MODULES.items()}
    parser = argparse.ArgumentParser(prog="visdet", **_described(_DESCRIPTION))
    parser.add_argument("--version", action="version", version=f"visdet {visdet.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, module in modules.items():
        text = module.__doc__ or ""
        summary = text.partition("\n")[0].partition(". ")[0].rstrip(".")
        module.add_arguments(commands.add_parser(name, help=summary, **_described(text)))
    with suppress(ImportError):  # The package argcomplete completes arguments in the shell.
        import_module("argcomplete").autocomplete(parser)
    given = arguments or sys.argv[1:] or ["--help"]
    first = given[0]
    if not first.startswith("-") and first not in modules:
        near = did_you_mean(first, modules) or ". `visdet --help` lists them"
        parser.error(f"there is no command {first!r}{near}")
    options, others = parser.parse_known_args(given)
    command = options.command
    if command != "doctor":  # It tells what is not installed.
        check_installation(f"visdet {command}")
    if problem := sort_names(options, others):
        own = commands.choices[command]
        known = re.findall(r"--[\w-]+", own.format_help())
        unknown = [other.partition("=")[0] for other in others if other.startswith("--")]
        own.error(problem + "".join(did_you_mean(option, known) for option in unknown))
    if command in _PRINTING:  # The reader of the output, such as head, may end before.
        signal(SIGPIPE, SIG_DFL)
    if status := _run(command, modules[command], options):
        sys.exit(status)


def _described(text: str) -> dict[str, Any]:
    return {"description": text, "formatter_class": argparse.RawDescriptionHelpFormatter}


def _run(name: str, module: ModuleType, arguments: argparse.Namespace) -> int | None:
    if name == "doctor":
        return module.run(arguments)
    from visdet.engine import tool_session
    from visdet.engine.process.places import no_empty_folders

    given = vars(arguments)
    del given["command"]
    given.pop("required_names", None)
    folders = map(given.get, ("out", "out_dir", "output_dir"))
    with tool_session(), no_empty_folders(*folders):
        return module.run(**given)
