"""List the configs of the package, or copy one with the files it inherits from, to change it.

visdet configs
visdet configs copy deformable_detr/deformable-detr_shapes
visdet train configs/deformable_detr/deformable-detr_shapes.py      # the copy

A config of yours can also inherit without a copy: _base_ = "visdet::deformable_detr/deformable-detr_shapes.py"
"""

import argparse
from typing import Any

from visdet.command_line import complete_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    commands = parser.add_subparsers(
        dest="action", metavar="[copy NAME [FOLDER]]", help="without it, the configs are listed"
    )
    copying = commands.add_parser("copy", help="copy a config with its bases")
    name: Any = copying.add_argument("name", help="the name of a config of the package")
    name.completer = complete_config
    copying.add_argument(
        "folder", nargs="?", default="configs", help="folder to copy into (default: %(default)s)"
    )


def run(action: str | None, name: str = "", folder: str = "") -> None:
    """Run the command."""
    from itertools import takewhile

    from visdet.engine.config.packaged import CONFIGS, packaged_configs

    if action == "copy":
        copy(name, folder)
        return
    names = packaged_configs()
    for known in names:
        lines = takewhile(
            lambda line: line[:1] == "#", (CONFIGS / f"{known}.py").read_text("utf-8").splitlines()
        )
        sentence = " ".join(line.strip("# ") for line in lines).partition(". ")[0].rstrip(".")
        print(f"{known:{max(map(len, names))}}  {sentence}".rstrip())


def copy(name: str, folder: str) -> None:
    """Copy a config of the package and its bases into a folder, where they keep their places beside each other.

    Raises:
        ConfigError: there is no such config. UserError: a file of another content is there already.
    """
    import filecmp
    from pathlib import Path

    from visdet.engine import UserError, check_work_dir, say
    from visdet.engine.config.files import files_of_config
    from visdet.engine.config.packaged import CONFIGS, PACKAGE
    from visdet.files.writing import write_atomically

    name = PACKAGE + name.removeprefix(PACKAGE)
    files = {file: Path(folder, file.relative_to(CONFIGS)) for file in files_of_config(name)}
    for file, target in files.items():
        if target.exists() and not filecmp.cmp(file, target, shallow=False):
            raise UserError(f"{target} exists and differs from the package's file; give another folder")
    for file, target in files.items():
        check_work_dir(target.parent, "FOLDER")
        write_atomically(target, file.read_bytes())
        say(f"wrote {target}")
