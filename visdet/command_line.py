"""The parts of a tool that need no large imports, so that ``--help`` and messages on wrong arguments appear at once."""

import argparse
import ctypes
import io
import os
import re
import sys
from typing import Any

from visdet.errors import MissingPackageError
from visdet.train_extra import require_train_extra

__all__ = ["CfgOptions", "check_installation", "positive_int"]

# OpenMP threads spin while they wait, which takes the cores from other processes and from each other. GNU's library
# reads this variable when torch is loaded. Beside a busy process, a training iteration then takes half the time.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # the numbers of mallopt's parameters in malloc.h
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


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


_keep_freed_memory()

if isinstance(sys.stdout, io.TextIOWrapper):  # A name that the terminal cannot show must not end a program.
    sys.stdout.reconfigure(errors="backslashreplace")


class CfgOptions(argparse.Action):
    """mmengine's argparse action for ``--cfg-options KEY=VALUE ...``, with a message for a value that is not a pair."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._arguments = (args, kwargs)
        super().__init__(*args, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        for pair in values or ():
            if not pair.partition("=")[0] or "=" not in pair:
                raise argparse.ArgumentError(self, f"expected KEY=VALUE, got {pair!r}")
        check_installation(parser.prog)
        from mmengine.config import DictAction

        args, kwargs = self._arguments
        try:
            DictAction(*args, **kwargs)(parser, namespace, list(map(_protected, values or ())), option_string)
        except AssertionError as error:  # mmengine raises this if brackets do not match.
            reason = _with_spaces(str(error))
            raise argparse.ArgumentError(self, f"cannot read {' '.join(values)}: {reason}") from error
        options = getattr(namespace, self.dest)
        setattr(namespace, self.dest, {key: _with_spaces(value) for key, value in options.items()})


# mmengine drops all spaces of a value. Those that stand inside a word, as in the name of a folder, are hidden from it
# as characters that an argument of a program cannot contain.
_SPACES_IN_A_WORD = re.compile(r"(?<![\s,(\[]) +(?![\s,)\]])")


def _protected(pair: str) -> str:
    key, _, value = pair.partition("=")
    return f"{key}={_SPACES_IN_A_WORD.sub(lambda spaces: chr(0) * len(spaces[0]), value.strip())}"


def _with_spaces(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_with_spaces, value))
    return value.replace(chr(0), " ") if isinstance(value, str) else value


def positive_int(text: str) -> int:
    """Return the number that an option of the command line gives. As a ``type`` of argparse it refuses others."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return number


def check_installation(program: str = sys.argv[0]) -> None:
    """End the program with a message if the packages of the extra ``train`` are not installed."""
    try:
        require_train_extra(program)
    except MissingPackageError as error:
        sys.exit(f"error: {error}")
