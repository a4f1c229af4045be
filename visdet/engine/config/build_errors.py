"""Errors that are raised while the parts of a config are built, completed by their place in the config."""

import collections
import contextlib
import enum
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import mmengine
import torch
from mmengine.config import Config
from torch import nn
from torch.nn.parameter import is_lazy

from visdet import registry
from visdet.checks.arguments import misfits, parameters_of
from visdet.errors import InvalidInputError, InvalidTypeError, UserError, add_hint, built_names

_UNEXPECTED = re.compile(r"\w+(\.__init__)?\(\) got an unexpected keyword argument '(\w+)'")
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
def building(cfg: Config, *sections: str) -> Iterator[None]:
    """Add a hint to an error of the block that names the part of the config it comes from.

    Args:
        cfg: the whole config.
        sections: the top-level keys that the block builds from.

    Raises:
        InvalidTypeError: replaces Python's error on a keyword of the config.
        InvalidInputError: replaces an error by which a constructor of torch or mmengine refuses a value.
    """
    try:
        yield
    except Exception as error:
        given = {name: cfg[name] for name in sections if cfg.get(name) is not None}
        if not isinstance(error, UserError) and (message := _unknown_keyword(error, given)):
            raise InvalidTypeError(message) from error
        place = _place(given, built_names(error)) or " or ".join(given)
        if isinstance(error, _REFUSALS) and not isinstance(error, UserError) and _is_of_a_library(error):
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidInputError(f"{place} cannot be built: {reason}") from error
        add_hint(error, f"in the config: {place}")
        raise


def _unknown_keyword(error: Exception, given: dict[str, Any]) -> str | None:
    """Return a message if an error is Python's on a keyword that stands in the sections of a config."""
    match = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
    for path, node in _nodes(given) if match else ():
        if match and match[2] in node:
            targets = _targets(node.get("type"), path.partition(".")[0])
            known = ", ".join(name for target in targets for name in parameters_of(target))
            return f"{path}: {match[0]}" + (f"; it accepts {known}" if known else "")
    return None


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
    check_arguments(cfg, "model")
    with building(cfg, "model"):
        built = registry.MODELS.build(model)
        for name, parameter in built.named_parameters():
            # A vector of no numbers often only holds a module's device.
            if not is_lazy(parameter) and parameter.dim() > 1 and not parameter.numel():
                raise InvalidInputError(
                    f"model cannot be built: {name} would have the shape {list(parameter.shape)}, without a number"
                )
    return built


def check_arguments(cfg: Config, *sections: str, classes: dict[str, Callable] | None = None) -> None:
    """Compare what sections of a config give with the annotations of the classes that are built from it.

    Args:
        cfg: the whole config.
        sections: its top-level keys.
        classes: the class that is built from a section whatever its ``type`` is, by the path of the section.

    Raises:
        InvalidInputError: a value does not fit, such as ``lr='1e-3'``. The message names its path.
    """
    for section in sections:
        for path, node in _nodes({section: cfg.get(section)}):
            found = [
                misfits(target, node)
                for target in _targets((classes or {}).get(path) or node.get("type"), section)
            ]
            if found and all(found):  # Several registries may have a name.
                raise InvalidInputError(f"{path}.{found[0][0]}")


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
