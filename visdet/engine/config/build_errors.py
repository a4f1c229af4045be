"""Errors that are raised while the parts of a config are built, completed by their place in the config."""

import collections
import contextlib
import enum
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mmengine
import torch
from mmengine.config import Config
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from visdet import registry
from visdet.checks.arguments import parameters_of
from visdet.errors import InvalidInputError, InvalidTypeError, UserError, add_hint, built_names

from ..errors import nearest_names
from .packaged import did_you_mean
from .text import dicts_in

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
# The packages whose constructors refuse values by errors that are not a UserError.
_LIBRARIES = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (mmengine, torch))
_LIBRARIES += (contextlib.__file__, collections.__file__, enum.__file__)
_OURS = os.path.dirname(registry.__file__) + os.sep
_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def building(cfg: Config, *sections: str, messages_name_it: bool = False) -> Iterator[None]:
    """Add a hint to an error of the block that names the part of the config it comes from.

    Args:
        cfg: the whole config.
        sections: the top-level keys that the block builds from.
        messages_name_it: whether a UserError of the block names the part of the config itself, and needs no hint.

    Raises:
        InvalidTypeError: replaces Python's error on a keyword of the config.
        InvalidInputError: replaces an error by which a constructor of torch or mmengine refuses a value.
    """
    try:
        yield
    except Exception as error:
        given = {name: cfg[name] for name in sections if cfg.get(name) is not None}
        place = _place_of(error, given)
        text = str(error)
        if isinstance(error, UserError):
            if not messages_name_it:
                add_hint(error, f"in the config: {place}")
            raise
        match = _UNEXPECTED.search(text) if isinstance(error, TypeError) else None
        keyword: Any = match and match[1]
        for path, node in dicts_in(given) if keyword else ():
            if keyword in node:
                raise InvalidTypeError(f"{path}: {_unexpected(keyword, node) or text}") from error
        if isinstance(error, _REFUSALS) and _is_of_a_library(error):
            reason = " ".join(text.split()) or type(error).__name__
            raise InvalidInputError(f"{place} cannot be built: {reason}") from error
        add_hint(error, f"in the config: {place}")
        raise


def _unexpected(name: str, node: dict) -> str | None:
    """Return the error on a keyword that the class of a dict does not take, or None if the error is of another class.

    A class may pass keywords on to its base, so that Python's error is about the base and does not know the others.
    """
    kind = node.get("type", DataLoader)
    if isinstance(kind, str):
        known_to = (
            own for own in vars(registry).values() if isinstance(own, registry.Registry) and kind in own
        )
        owner = next(known_to, None)
        kind = owner and owner.get(kind)
    known = parameters_of(kind) if kind else {name}
    if name in known:
        return None
    hint = did_you_mean(nearest_names(name, known, 0.75, 1)) or f"; it accepts {', '.join(known)}"
    return f"{kind.__name__}() got an unexpected keyword argument {name!r}{hint}"


def _place_of(error: Exception, sections: dict[str, Any]) -> str:
    """Return the path of the dict that was being built, or of the innermost one that is the only one of its type."""
    place = " or ".join(sections)
    for name in built_names(error):
        paths = [path for path, node in dicts_in(sections) if registry.name_of_type(node.get("type")) == name]
        if len(paths) == 1:
            place = paths[0]
    return place


def _is_of_a_library(error: Exception) -> bool:
    """Return whether a package raises the error that a constructor has called, with nothing of the user's between."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    called = all(file.startswith((*_LIBRARIES, _OURS)) for file in files[1:])
    return called and files[-1].startswith(_LIBRARIES)


def build_model(cfg: Config, model: dict) -> nn.Module:
    """Build ``model``, which is the section of that name of a config.

    Raises:
        UserError: a constructor refuses a value, or a layer has a width of 0.
    """
    with building(cfg, "model"):
        built = registry.MODELS.build(model)
        for name, parameter in built.named_parameters():
            shape = [] if is_lazy(parameter) else list(parameter.shape)
            # A vector of no numbers often only holds a module's device.
            if len(shape) > 1 and 0 in shape:
                raise InvalidInputError(
                    f"model cannot be built: {name} would have the shape {shape}, without a number"
                )
    return built
