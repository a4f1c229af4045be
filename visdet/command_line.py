"""The parts of a tool that need no large imports, so that ``--help`` and messages on wrong arguments appear at once."""

import argparse
import ctypes
import glob
import io
import os
import sys
from typing import Any

from visdet.errors import MissingPackageError
from visdet.option_values import CfgOptions
from visdet.train_extra import require_train_extra

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3  # the numbers of mallopt's parameters in malloc.h
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def prepare_process() -> None:
    """Set up the process of a program, which must call this before it loads torch.

    Idle threads sleep, freed memory is kept (see :func:`_keep_freed_memory`), and a name that the terminal cannot show
    does not end the program. Importing visdet does none of this, because it would change the programs of others.
    """
    # OpenMP threads spin while they wait, which takes the cores from other processes and from each other. GNU's library
    # reads this variable when torch is loaded. Beside a busy process, a training iteration then takes half the time.
    variables = os.environ
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", "1000")
    variables.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # Videos without a codec would print many lines.
    _keep_freed_memory()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _keep_freed_memory() -> None:
    """Let the C library keep up to 1 GiB of memory that tensors on the CPU leave, in huge pages if the system has them.

    It would return the memory to the system after each training step, which then clears the same pages in the next one.
    That takes a tenth of a step of the small models. Environment variables of glibc's malloc go first. A library
    without ``mallopt`` is left as it is.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads this variable at its first large tensor.
    if any(name in os.environ for name in _MALLOC_VARIABLES):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # glibc accepts no larger number.


def positive_int(text: str) -> int:
    """Return the number that an option of the command line gives. As a ``type`` of argparse it refuses others."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return number


def folder_name(text: str) -> str:
    """Return the folder that an option of the command line gives."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got ''")
    return text


_SHARED: dict[str, dict[str, Any]] = {
    "--cfg-options": {
        "nargs": "+",
        "action": CfgOptions,
        "metavar": "KEY=VALUE",
        "help": "change values of the config, such as train_cfg.max_iters=100",
    },
    "checkpoint": {
        "nargs": "?",
        "help": "a checkpoint file, its http(s) address, or a name of docs/model_zoo.md. It may "
        "stand alone in place of CONFIG CHECKPOINT",
    },
    "images": {
        "nargs": "*",
        "help": "images, videos, and folders that are searched for them with their subfolders; the number of a camera, "
        "such as 0, or the address of a stream, rtsp://...",
    },
    "--data": {
        "metavar": "FOLDER",
        "type": folder_name,
        "help": "pictures with boxes in a format that visdet convert reads: COCO, YOLO, Pascal VOC, CSV tables",
    },
    "--work-dir": {
        "help": "folder to write (default: the first free one of work_dirs/<name of the config>, …_2 and so on; "
        "visdet test takes …_test)"
    },
    "--graph": {
        "action": argparse.BooleanOptionalAction,
        "help": "run the model as CUDA graphs on a GPU (default: the config's graph, True)",
    },
    "--launcher": {
        "choices": ("none", "pytorch"),
        "help": "launcher of the processes (default: 'pytorch' under torchrun, 'none' otherwise)",
    },
    "--batch-size": {"type": positive_int, "default": 1, "help": "images at once (default: 1)"},
    "--amp": {"action": "store_true", "help": "compute in bfloat16 where torch's autocast does"},
    "--device": {"help": "device, such as 'cpu' or 'cuda:1' (default: the GPU if there is one)"},
    "--shape": {
        "nargs": 2,
        "type": positive_int,
        "metavar": ("HEIGHT", "WIDTH"),
        "help": "size of an image (default: the size that the test pipeline resizes to)",
    },
    "--score-thr": {
        "type": float,
        "help": "leave out objects with a lower score (default: the score of the best F1 of each class in the "
        "checkpoint's own validation, or 0.3 if there was none)",
    },
}


def add_config_arguments(parser: argparse.ArgumentParser, *others: str, needs_config: bool = True) -> None:
    """Add the argument ``config``, the option ``--cfg-options`` and others that several commands share, by name."""
    parser.set_defaults(required_names=[name for name in others if name in ("checkpoint", "images")])
    add = parser.add_argument
    config: Any = add(
        "config",
        nargs=None if needs_config else "?",
        help="a config file, or the name of a config that `visdet configs` lists; or a checkpoint, which holds its "
        "config",
    )
    config.completer = complete_config  # argcomplete reads it.
    for name in ("--cfg-options", *others):
        add(name, **_SHARED[name])


def sort_names(args: argparse.Namespace, others: list[str]) -> str | None:
    """Let a checkpoint stand alone in place of CONFIG CHECKPOINT, and return what is wrong with the arguments.

    Args:
        args: the arguments of a command. If it has ``config`` and ``checkpoint``, a checkpoint that is given in the
            place of the config becomes both, and what follows becomes the first of its ``images``.
        others: what argparse has left over. It ends the list of names at the first option between them.
    """
    given = vars(args)
    command = given["command"]
    if "checkpoint" not in given:
        return left_over(command, others)
    from visdet.engine.checkpoints.held_config import names_checkpoint

    names = [name for name in (given["config"], given["checkpoint"]) if name is not None]
    names += given.get("images", ())
    if not any(other.startswith("-") for other in others):
        names = names + others
        others = []
    first = names.pop(0)
    if os.path.isfile(os.path.join(first, "model.json")):
        return f"{first} is an exported folder; its README.md says how it is run"
    checkpoint = first
    if not names_checkpoint(first):
        checkpoint = names.pop(0) if names else None
    given.update(config=first, checkpoint=checkpoint)
    if "images" in given:
        given["images"] = names
        names = []
    missing = [name for name in given.get("required_names", ()) if not given[name]]
    if missing and checkpoint != first:
        missing[-1] += f" ({first} is no checkpoint, so that it was taken as the config)"
    if missing:
        return f"the following arguments are required: {', '.join(missing)}"
    return left_over(command, names + others)


def left_over(command: str, others: list[str]) -> str | None:
    """Return the message on arguments that are left over, or None."""
    if not others:
        return None
    message = f"unrecognized arguments: {' '.join(others)}"
    if command in ("train", "test"):
        from visdet.engine.config.other_names import NAMES_OF_TESTING, NAMES_OF_TRAINING

        known = NAMES_OF_TRAINING if command == "train" else NAMES_OF_TESTING
        for other in others:
            name = other.strip("-").partition("=")[0].replace("-", "_")
            if other.startswith("-") and name in known:
                message += f"; for --{name} write {known[name]}"
    return message


def complete_config(prefix: str, **_: Any) -> list[str]:
    """Return the config files and the names of the package's configs that begin with ``prefix``."""
    from visdet.engine.config.packaged import packaged_configs

    files = [path + "/" * os.path.isdir(path) for path in glob.glob(f"{glob.escape(prefix)}*")]
    return [*files, *(name for name in packaged_configs() if name.startswith(prefix))]


def add_options(parser: argparse.ArgumentParser, **options: tuple[Any, str]) -> None:
    """Add an option for each keyword. Its default, whose type its values have, and its help are given."""
    for name, (default, text) in options.items():
        flag = f"--{name.replace('_', '-')}"
        text = f"{text} (default: %(default)s)"
        kind = seed_number if name == "seed" else folder_name if name == "out_dir" else type(default)
        parser.add_argument(flag, type=kind, default=default, help=text)


def seed_number(text: str) -> int:
    """Return the seed that an option of the command line gives."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {2**32 - 1}, got {text!r}")
    return int(text)


def check_installation(program: str) -> None:
    """End the program with a message if the packages of the extra ``train`` are not installed."""
    try:
        require_train_extra(program)
    except MissingPackageError as error:
        sys.exit(f"error: {error}")
