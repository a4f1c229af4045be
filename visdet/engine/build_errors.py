"""Errors that are raised while a runner builds its parts, completed by the place in the config."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mmengine.config import Config

from visdet import registry
from visdet.errors import InvalidTypeError, add_hint, built_names

from .errors import nearest_names

__all__ = ["building", "unknown_keyword_message"]

_UNEXPECTED = re.compile(
    r"(?:(?P<owner>[\w.<>]+)\.)?(?P<function>\w+)\(\) got an unexpected keyword argument '(?P<keyword>\w+)'"
)
_REGISTRIES = tuple(
    getattr(registry, name)
    for name in (
        "MODELS",
        "DATASETS",
        "TRANSFORMS",
        "DATA_SAMPLERS",
        "HOOKS",
        "LOOPS",
        "METRICS",
        "EVALUATOR",
        "OPTIMIZERS",
        "OPTIM_WRAPPERS",
        "OPTIM_WRAPPER_CONSTRUCTORS",
        "PARAM_SCHEDULERS",
        "TASK_UTILS",
        "VISUALIZERS",
        "VISBACKENDS",
        "LOG_PROCESSORS",
        "WEIGHT_INITIALIZERS",
    )
)


@contextmanager
def building(cfg: Config, *sections: str, defaults: dict[str, Callable] | None = None) -> Iterator[None]:
    """Add a hint to an error of the block that names the part of the config it comes from.

    Args:
        cfg: the whole config.
        sections: the top-level keys that the block builds from.
        defaults: the class that is built if a section has no ``type``, by the path of the section.

    Raises:
        InvalidTypeError: replaces a ``TypeError`` about a keyword of the config that its class does not accept. The
            message names the keyword, the class and the keywords that the class accepts.
    """
    try:
        yield
    except Exception as error:
        given = {name: cfg[name] for name in sections if cfg.get(name) is not None}
        if isinstance(error, TypeError) and (
            message := unknown_keyword_message(str(error), given, defaults or {})
        ):
            raise InvalidTypeError(message) from error
        add_hint(error, f"in the config: {_place(given, built_names(error)) or ' or '.join(given)}")
        raise


def unknown_keyword_message(text: str, sections: dict[str, Any], defaults: dict[str, Callable]) -> str | None:
    """Return a message about a keyword that a constructor does not accept, or None if the config does not contain it.

    Args:
        text: Python's message, which names the keyword and the function that refused it.
        sections: the parts of a config by their top-level keys.
        defaults: the class that is built if a section has no ``type``, by the path of the section.
    """
    match = _UNEXPECTED.search(text)
    if match is None:
        return None
    refused_by = (match["owner"] or match["function"]).rsplit(".", 1)[-1]
    for path, node in _nodes(sections):
        if match["keyword"] not in node:
            continue
        for target in _targets(node.get("type", defaults.get(path))):
            if refused_by in [kind.__name__ for kind in getattr(target, "__mro__", (target,))]:
                return _message(path, match["keyword"], target)
    return None


def _message(path: str, keyword: str, target: Any) -> str:
    accepted = _accepted_keywords(target)
    lines = [f"{target.__name__} does not know the keyword {keyword!r}."]
    if nearest := nearest_names(keyword, accepted, count=1):
        lines.append(f"Did you mean {nearest[0]!r}?")
    lines.append(f"It accepts: {', '.join(accepted)}. In the config it is {path}.{keyword}.")
    return " ".join(lines)


def _nodes(sections: dict[str, Any]) -> Iterator[tuple[str, dict]]:
    """Yield every dict of the sections with its dotted path, the outer ones first."""
    waiting: list[tuple[str, Any]] = list(sections.items())
    while waiting:
        path, node = waiting.pop(0)
        if isinstance(node, dict):
            yield path, node
            waiting += [(f"{path}.{key}", value) for key, value in node.items()]
        elif isinstance(node, list | tuple):
            waiting += [(f"{path}.{position}", value) for position, value in enumerate(node)]


def _targets(kind: Any) -> Iterable[Any]:
    """Return the classes and functions that a ``type`` may stand for. A name may be in several registries."""
    if not isinstance(kind, str):
        return [kind] if hasattr(kind, "__name__") else []
    found = []
    for names in _REGISTRIES:
        with suppress(KeyError):
            found.append(names.get(kind))
    return [target for target in found if hasattr(target, "__name__")]


def _place(sections: dict[str, Any], names: list[str]) -> str | None:
    """Return the path of the dict that was being built when the error was raised, or None if it is ambiguous.

    Args:
        sections: the parts of a config by their top-level keys.
        names: the types that were being built, the outermost first.
    """
    for name in reversed(names):
        paths = [path for path, node in _nodes(sections) if _type_name(node) == name]
        if len(paths) == 1:
            return paths[0]
    return None


def _type_name(node: dict) -> str:
    kind = node.get("type", "")
    return kind.rsplit(".", 1)[-1] if isinstance(kind, str) else getattr(kind, "__name__", "")


def _accepted_keywords(target: Any) -> list[str]:
    """Return the keywords that a class or function accepts, including those that it passes on to its base classes."""
    accepted: list[str] = []
    bases: tuple[Any, ...] = inspect.getmro(target) if inspect.isclass(target) else ()
    functions = [kind.__init__ for kind in bases] or [target]
    for function in dict.fromkeys(functions):
        if function is object.__init__:
            continue
        parameters = inspect.signature(function).parameters.values()
        accepted += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in dict.fromkeys(accepted) if name != "self"]
