"""One clear message, without a wall of traceback, for a mistake in a config, a file or a command."""

import atexit
import difflib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch

__all__ = ["CheckpointError", "ConfigError", "UserError", "explain", "nearest_names", "tool_session"]

SHOW_TRACEBACK = "VISDET_TRACEBACK"
_UNEXPECTED = re.compile(
    r"(?:(?P<owner>\w+)\.)?(?P<function>\w+)\(\) got an unexpected keyword argument '(?P<keyword>\w+)'"
)
_BUILD_ERRORS = (ValueError, TypeError, KeyError, OSError, AssertionError, ImportError, RuntimeError)
_BUILDERS = ("build_dataloader", "build_train_loop", "build_val_loop", "build_test_loop")
_HINT = f"{SHOW_TRACEBACK}=1 shows the traceback"


class UserError(Exception):
    """A mistake in what the user gave: the message says what, where and what to do, and stands alone."""


class ConfigError(UserError):
    """A config file, or an option on the command line, that cannot be used as it is."""


class CheckpointError(UserError):
    """A checkpoint that is missing, unreadable, or made for another model."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A checkpoint that is not there, or cannot be fetched."""


@contextmanager
def tool_session() -> Iterator[None]:
    """Run a tool's body: known mistakes end in one message on stderr and exit status 1, bugs in a traceback.

    ``VISDET_TRACEBACK=1`` in the environment shows the traceback of known mistakes too. The processes of a
    distributed run end together at the end of the body; after an error torchrun ends them.
    """
    try:
        yield
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            _end_together()
    except KeyboardInterrupt:
        print("interrupted; `--resume` continues from the newest checkpoint", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        message = explain(error)
        if message is None or os.environ.get(SHOW_TRACEBACK):
            raise
        rank = os.environ.get("RANK")
        print(f"error{f' (rank {rank})' if rank else ''}: {message}", file=sys.stderr, flush=True)
        sys.exit(1)


def _end_together() -> None:
    """End this process when every process of the group is done, with exit status 0.

    Python's exit handlers run; the destructors of C++ libraries do not, because they race with the group's threads
    ("terminate called without an active exception", now and then, after all work was done).
    """
    torch.distributed.barrier()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def explain(error: BaseException) -> str | None:
    """Return the message for a user's mistake, or None for an error whose traceback somebody needs to see."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, KeyError) and " registry" in str(error):
        return str(error.args[0])
    if isinstance(error, TypeError) and (keyword := _unknown_keyword_message(error)):
        return keyword
    if "in DataLoader worker process" in str(error):
        return str(error).strip().splitlines()[-1] if "visdet/datasets" in str(error) else None
    built = [frame.f_locals["obj_cls"].__name__ for frame in _build_frames(error.__traceback__)]
    if isinstance(error, _BUILD_ERRORS) and (built or _builds_a_runner(error.__traceback__)):
        return f"{_first_words(error)}\n(while building {' > '.join(built) or 'the runner'}; {_HINT})"
    if isinstance(error, OSError | ValueError | KeyError) and _passed_through("visdet.datasets", error):
        return f"{_first_words(error)}\n({_HINT})"
    return None


def nearest_names(name: str, known: Iterable[str], cutoff: float = 0.6, count: int = 3) -> list[str]:
    """Return up to ``count`` names of ``known`` that resemble ``name``, the nearest first."""
    return difflib.get_close_matches(name, sorted(set(known)), n=count, cutoff=cutoff)


def _first_words(error: BaseException) -> str:
    """Return the message of an error; its class too where the message alone would say too little."""
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    speaks_for_itself = isinstance(error, ValueError | OSError) and message
    return message if speaks_for_itself else f"{type(error).__name__}: {message}"


def _frames(traceback: TracebackType | None) -> list[FrameType]:
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames


def _build_frames(traceback: TracebackType | None) -> list[FrameType]:
    """Return the frames in which mmengine builds an object from a config, outermost first."""
    return [
        frame
        for frame in _frames(traceback)
        if frame.f_code.co_name == "build_from_cfg" and hasattr(frame.f_locals.get("obj_cls"), "__name__")
    ]


def _builds_a_runner(traceback: TracebackType | None) -> bool:
    return any(frame.f_code.co_name == "build_runner_from_cfg" for frame in _frames(traceback))


def _passed_through(package: str, error: BaseException) -> bool:
    names = (str(frame.f_globals.get("__name__")) for frame in _frames(error.__traceback__))
    return any(name.startswith(package) for name in names)


def _unknown_keyword_message(error: TypeError) -> str | None:
    """Return the message for a keyword that a constructor does not know, with the class and what it accepts."""
    match = _UNEXPECTED.search(str(error))
    if match is None or (match["owner"] is not None and match["function"] != "__init__"):
        return None
    called = match["owner"] or match["function"]
    target = _find_called(called, error.__traceback__)
    if target is None:
        return None
    accepted = _accepted_keywords(target)
    lines = [f"{target.__name__} does not know the keyword {match['keyword']!r}."]
    if nearest := nearest_names(match["keyword"], accepted, count=1):
        lines.append(f"Did you mean {nearest[0]!r}?")
    lines.append(f"It accepts: {', '.join(accepted)}.")
    return " ".join(lines)


def _find_called(name: str, traceback: TracebackType | None) -> Any:
    """Return the class or function called ``name`` that was being built, innermost first.

    A call from anywhere else with a wrong keyword is a bug, not a config's mistake: then the answer is None.
    """
    for frame in reversed(_build_frames(traceback)):
        built = frame.f_locals["obj_cls"]
        for candidate in getattr(built, "__mro__", (built,)):
            if candidate.__name__ == name:
                return built
    for frame in _frames(traceback):  # mmengine builds the DataLoader and loops without a registry
        if frame.f_code.co_name in _BUILDERS and inspect.isclass(found := frame.f_globals.get(name)):
            return found
    return None


def _accepted_keywords(target: Any) -> list[str]:
    """Return the keywords that a class or function accepts, those of its bases too where it passes them on."""
    accepted: list[str] = []
    for candidate in getattr(target, "__mro__", (target,)):
        function = candidate.__dict__.get("__init__") if inspect.isclass(candidate) else candidate
        if function is None or candidate is object:
            continue
        parameters = inspect.signature(function).parameters.values()
        accepted += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in dict.fromkeys(accepted) if name != "self"]
