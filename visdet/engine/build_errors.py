"""Errors that are raised while a runner builds its parts, completed by the place in the config."""

import collections
import contextlib
import enum
import inspect
import os
import re
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import mmengine
import torch
from mmengine.config import Config
from torch import nn
from torch.nn.parameter import is_lazy

from visdet import registry
from visdet.errors import InvalidInputError, InvalidTypeError, UserError, add_hint, built_names

from .errors import nearest_names

_UNEXPECTED = re.compile(
    r"(?:(?P<owner>[\w.<>]+)\.)?(?P<function>\w+)\(\) got an unexpected keyword argument '(?P<keyword>\w+)'"
)
# The registries whose names stand in each section.
_REGISTRIES = {
    "model": (registry.MODELS, registry.TASK_UTILS, registry.WEIGHT_INITIALIZERS),
    "optim_wrapper": (registry.OPTIM_WRAPPERS, registry.OPTIMIZERS, registry.OPTIM_WRAPPER_CONSTRUCTORS),
    "param_scheduler": (registry.PARAM_SCHEDULERS,),
    "log_processor": (registry.LOG_PROCESSORS,),
    "visualizer": (registry.VISUALIZERS, registry.VISBACKENDS),
    **dict.fromkeys(("default_hooks", "custom_hooks"), (registry.HOOKS,)),
    **dict.fromkeys(("train_cfg", "val_cfg", "test_cfg"), (registry.LOOPS,)),
    **dict.fromkeys(("val_evaluator", "test_evaluator"), (registry.METRICS, registry.EVALUATOR)),
    **dict.fromkeys(
        ("train_dataloader", "val_dataloader", "test_dataloader"),
        (registry.DATASETS, registry.TRANSFORMS, registry.DATA_SAMPLERS, registry.FUNCTIONS),
    ),
}
# The packages whose constructors refuse values by errors that are not a UserError.
_LIBRARIES = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (mmengine, torch))
_LIBRARIES += (contextlib.__file__, collections.__file__, enum.__file__)
_OURS = os.path.dirname(registry.__file__) + os.sep
_REFUSALS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError),
    *(LookupError, RuntimeError, TypeError, ValueError),
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
        InvalidInputError: replaces an error by which a constructor of torch or mmengine refuses a value.
    """
    try:
        yield
    except Exception as error:
        given = {name: cfg[name] for name in sections if cfg.get(name) is not None}
        if isinstance(error, TypeError) and (
            message := unknown_keyword_message(str(error), given, defaults or {})
        ):
            raise InvalidTypeError(message) from error
        place = _place(given, built_names(error)) or " or ".join(given)
        if isinstance(error, _REFUSALS) and not isinstance(error, UserError) and _is_of_a_library(error):
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidInputError(f"{place} cannot be built: {reason}") from error
        add_hint(error, f"in the config: {place}")
        raise


def _is_of_a_library(error: Exception) -> bool:
    """Return whether torch or mmengine raised an error without a part in it of code that is not ours."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return files[-1].startswith(_LIBRARIES) and all(
        file.startswith((*_LIBRARIES, _OURS)) for file in files[1:]
    )


def build_model(cfg: Config, model: dict) -> nn.Module:
    """Build ``model``, which is the section of that name of a config.

    Raises:
        UserError: a constructor refuses a value, or a layer has a width of 0.
    """
    check_texts(cfg, "model")
    with building(cfg, "model"):
        built = registry.MODELS.build(model)
        for name, parameter in built.named_parameters():
            # A vector of no numbers often only holds a module's device.
            if not is_lazy(parameter) and parameter.dim() > 1 and not parameter.numel():
                raise InvalidInputError(
                    f"model cannot be built: {name} would have the shape {list(parameter.shape)}, without a number"
                )
    return built


def check_texts(cfg: Config, *sections: str, defaults: dict[str, Callable] | None = None) -> None:
    """Check that sections of a config have no text where their classes take numbers, such as ``lr='1e-3'``.

    Raises:
        InvalidTypeError: they do. The message names the path and the text.
    """
    for section in sections:
        for path, node in _nodes({section: cfg.get(section)}):
            targets = list(_targets(node.get("type", (defaults or {}).get(path)), section))
            for key, value in node.items():
                if key == "type" or not targets:
                    continue
                is_list = isinstance(value, list | tuple)
                has_text = any(isinstance(item, str) for item in (value if is_list else [value]))
                if has_text and all(_takes_no_text(target, key, is_list) for target in targets):
                    raise InvalidTypeError(f"{path}.{key} must not be a text, got {value!r}")


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
        for target in _targets(node.get("type", defaults.get(path)), path.split(".")[0]):
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


def _targets(kind: Any, section: str) -> Iterable[Any]:
    """Return the classes and functions that a ``type`` in a section may stand for. Several registries may have it."""
    if not isinstance(kind, str):
        return [kind] if hasattr(kind, "__name__") else []
    found = []
    for names in _REGISTRIES.get(section, ()):
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
    return list(_parameters(target))


def _parameters(target: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class or function, including those that it passes on to its base classes."""
    accepted: dict[str, inspect.Parameter] = {}
    bases: tuple[Any, ...] = inspect.getmro(target) if inspect.isclass(target) else ()
    functions = [kind.__init__ for kind in bases] or [target]
    for function in dict.fromkeys(functions):
        if function is object.__init__:
            continue
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                accepted.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    accepted.pop("self", None)
    return accepted


def _takes_no_text(target: Any, keyword: str, is_list: bool) -> bool:
    """Return whether a keyword of a class or function takes numbers, or a list of numbers, and no text.

    The annotation decides, or the default if there is no annotation.
    """
    parameter = _parameters(target).get(keyword)
    if parameter is None:
        return False
    kinds = _kinds_of(parameter.annotation)
    if not kinds and parameter.default not in (None, parameter.empty):
        default = parameter.default
        kinds = {type(default)} | (
            {type(item) for item in default} if isinstance(default, list | tuple) else set()
        )
    if is_list:
        kinds -= {list, tuple, type(None)}
        return bool(kinds) and kinds <= {int, float}
    return bool(kinds) and kinds <= {int, float, bool, list, tuple, type(None)}


def _kinds_of(annotation: Any) -> set:
    """Return the classes that an annotation names. The set is empty if it is missing or a text."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return set()
    inner = [kind for kind in typing.get_args(annotation) if kind is not Ellipsis]
    origin = typing.get_origin(annotation) or annotation
    if inner and origin in (list, tuple, Sequence):
        return {list}.union(*map(_kinds_of, inner))
    if inner and origin in (typing.Union, types.UnionType):
        return set().union(*map(_kinds_of, inner))
    # A tensor is a number of its own kind, which no config holds.
    return set() if origin in (Sequence, typing.Any) else {origin} - {torch.Tensor}
