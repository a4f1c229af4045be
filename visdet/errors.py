"""Errors for mistakes of a user, whose message is enough, so that a tool prints it without a traceback.

Code that finds a mistake in a config, a file or a command raises one of these. The subclasses are also the Python
errors that a caller would expect (``ValueError``, ``FileNotFoundError``, ...). Every other exception is a bug of this
package or of the user's own code, and keeps its traceback.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

__all__ = [
    "ConfigError",
    "InvalidInputError",
    "InvalidTypeError",
    "MissingFileError",
    "MissingPackageError",
    "UnknownNameError",
    "UnwrittenFileError",
    "UserError",
    "add_hint",
    "build_step",
    "check_choice",
    "hints_of",
    "listed",
    "reading",
    "where_to_get",
]

_BUILDING = "while building "


class UserError(Exception):
    """A mistake in the user's input. The message says what is wrong, where it is and what to do."""


class ConfigError(UserError):
    """A config file, or an option on the command line, that cannot be used as it is."""


class InvalidInputError(UserError, ValueError):
    """A value in a config, or the content of a file, that cannot be used."""


class InvalidTypeError(UserError, TypeError):
    """An argument whose type, or a keyword whose name, is not accepted."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or a folder that does not exist."""


class MissingPackageError(UserError, ImportError):
    """A Python package that a feature needs and that is not installed."""


class UnwrittenFileError(UserError, OSError):
    """A file that cannot be written."""


class UnknownNameError(UserError, KeyError):
    """A name that is not known."""

    def __str__(self) -> str:
        return str(self.args[0])  # That of KeyError is the repr of the message, with escaped line breaks.


def add_hint(error: BaseException, hint: str) -> None:
    """Add a line that is printed below the message of an error. Python 3.10 has no ``add_note``."""
    error.__notes__ = [*hints_of(error), hint]  # type: ignore[attr-defined]


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise an InvalidInputError that begins with ``name`` if a value is none of two or more choices."""
    if value not in choices:
        *first, last = map(repr, choices)
        raise InvalidInputError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")


def listed(names: Iterable[object], limit: int = 10) -> str:
    """Return the first ``limit`` names joined by commas, and the number of the others."""
    names = list(names)
    rest = f", … {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(str, names[:limit])) + rest


@contextmanager
def where_to_get(text: str) -> Iterator[None]:
    """Add a hint to the error that a file of a data set is missing."""
    try:
        yield
    except MissingFileError as error:
        add_hint(error, text)
        raise


def hints_of(error: BaseException) -> list[str]:
    """Return the lines that :func:`add_hint` has added to an error."""
    return list(getattr(error, "__notes__", []))


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise an error that begins with ``what``, such as "info file x.pkl", if the block cannot read a file."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(f"{what} does not exist") from error
    except OSError as error:
        raise InvalidInputError(f"{what} cannot be read: {error.strerror or error}") from error


@contextmanager
def build_step(name: str) -> Iterator[None]:
    """Add ``while building <name>`` to an error of the block.

    Nested steps share one line, with the outermost step first, such as ``while building DeformableDETR > ResNet``.
    """
    try:
        yield
    except Exception as error:
        notes = hints_of(error)
        for place, note in enumerate(notes):
            if note.startswith(_BUILDING):
                notes[place] = f"{_BUILDING}{name} > {note.removeprefix(_BUILDING)}"
                break
        else:
            notes.append(f"{_BUILDING}{name}")
        error.__notes__ = notes  # type: ignore[attr-defined]
        raise


def built_names(error: BaseException) -> list[str]:
    """Return the names of the :func:`build_step` blocks that an error has passed through, the outermost first."""
    for note in hints_of(error):
        if note.startswith(_BUILDING):
            return note.removeprefix(_BUILDING).split(" > ")
    return []
