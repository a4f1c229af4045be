"""The config that a checkpoint holds. It is read as values, so that no code of a stranger's file runs."""

import ast
import importlib.util
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from mmengine.config import Config

from visdet.errors import listed
from visdet.registry import name_of_type

from ..config.checks import section_of, several_of
from ..config.foreign_scope import adopt_mmdet_scope
from ..config.load import given_dataset
from ..config.load import load_config as load_written_config
from ..config.packaged import find_config
from ..config.text import dicts_in, leaves
from ..errors import CheckpointError, ConfigError
from ..process.console import say
from .addresses import SUFFIXES, URL_SCHEMES

# What belongs to the run that wrote the checkpoint, or is for the user of the file to decide, and what a program adds.
_NOT_TAKEN_OVER = (
    "_base_",
    "__builtins__",
    "work_dir",
    "load_from",
    "resume",
    "launcher",
    "experiment_name",
    "trust_checkpoint",
    "allow_nonfinite_weights",
    "strict_load",
)
# The keys whose values name a class or a function.
_NAMING = ("type", "constructor", "runner_type")
# The packages whose classes registries have under the last part of their dotted names.
_REGISTERED = ("visdet", "mmdet", "mmcv", "mmengine", "torch")
_TIME_OF_A_RUN = re.compile(r"_\d{8}_\d{6}$")


def names_checkpoint(given: Any) -> bool:
    """Return whether a text or a path names a checkpoint: by its suffix, as an address, or as published weights."""
    if not isinstance(given, str | os.PathLike):
        return False
    name = os.fspath(given)
    if name.startswith(URL_SCHEMES) or name.endswith(SUFFIXES):
        return True
    if find_config(name) or os.path.exists(name):
        return False
    from .published import PUBLISHED  # This imports torch, which takes a second.

    return name in PUBLISHED


def load_config(
    config: str | os.PathLike | Config, options: dict[str, Any] | None = None, work_dir: str | None = None
) -> tuple[Config, list[str]]:
    """Return a config as :func:`visdet.engine.config.load.load_config` does, which may be that of a checkpoint.

    Raises:
        CheckpointError: the checkpoint holds no config, or one that runs code and is not trusted by the option
            ``trust_checkpoint``.
    """
    if names_checkpoint(config):
        from .checkpoint import read_checkpoint

        path = os.path.expanduser(config)
        trust = bool(options and options.get("trust_checkpoint"))
        config = config_of(read_checkpoint(path, trust=trust), path, trust)
    return load_written_config(config, options, work_dir)


def meta_of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a checkpoint says of its run under 'meta', or nothing."""
    meta = content.get("meta")
    return meta if isinstance(meta, Mapping) else {}


def config_of(content: Mapping[str, Any], path: str, trust: bool = False) -> Config:
    """Return the config that a checkpoint holds, without what belongs to the run that wrote it.

    Args:
        content: the checkpoint. path: its path, its address or its published name.
        trust: whether code in the config may run: values that are no literals, modules of ``custom_imports``, and types
            that are named by the module of their class.

    Raises:
        CheckpointError: there is no config, or it needs ``trust``. The message names what would run.
    """
    from .published import PUBLISHED

    held = meta_of(content).get
    text = held("cfg") or held("config")
    if path in PUBLISHED:
        return load_written_config(PUBLISHED[path][0])[0]
    if not isinstance(text, str):
        raise CheckpointError(
            f"checkpoint {path} holds no config. Give the one that it was trained with before it: CONFIG {path}"
        )
    values, code = _values(text, path)
    if trust and code:
        exec(compile(text, path, "exec"), values)
        values = {name: value for name, value in values.items() if not isinstance(value, ModuleType)}
    name = _TIME_OF_A_RUN.sub("", str(held("experiment_name") or Path(path).stem))
    own = {key: value for key, value in values.items() if key not in _NOT_TAKEN_OVER}
    cfg = Config(own, cfg_text=text, filename=f"{Path(name).name}.py")
    adopt_mmdet_scope(cfg)
    if not trust:
        code += _code_in(cfg.to_dict())
        if code:
            raise CheckpointError(
                f"the config in checkpoint {path} runs code: {listed(code, 6)}. If you trust its origin, add "
                "`--cfg-options trust_checkpoint=True`; or give a config of yours before the checkpoint"
            )
        for _, node in dicts_in(cfg._cfg_dict):
            for key in _NAMING:
                kind = node.get(key)
                if isinstance(kind, str):
                    node[key] = name_of_type(kind)  # Registries have classes under this name.
    return cfg


def say_differences(cfg: Config, content: Mapping[str, Any], path: str) -> None:
    """Say where a config that is given differs from that of the checkpoint in the model and the steps before it."""
    try:
        held = config_of(content, path)
    except (CheckpointError, ConfigError):
        return  # It holds none, or one that cannot be compared without running its code.
    here = _what_predicts(cfg)
    there = _what_predicts(held)
    found = []
    for key in {**there, **here}:
        own = here.get(key)
        other = there.get(key)
        if own != other:
            found.append(f"{key} is {own!r:.60} (there {other!r:.60})")
    if found:
        say(f"the config that is given differs from that of {path}, and is used: {listed(found, 4)}")


def _what_predicts(cfg: Config) -> dict[str, Any]:
    """Return the values that change predictions by their paths."""
    values = cfg.to_dict()
    pipeline = given_dataset(values, "test").get("pipeline")
    parts = {"model": values.get("model"), "test_dataloader.dataset.pipeline": pipeline}
    return {path: list(value) if isinstance(value, tuple) else value for path, value in leaves(parts)}


def _values(text: str, path: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values in the text of a config, and the names whose values are no literals."""
    values = {}
    code = []
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"the config in checkpoint {path} cannot be read: {error}") from error
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom():
                continue
            case ast.Assign(targets=[ast.Name(name)], value=value):
                with suppress(ValueError, TypeError, SyntaxError, RecursionError, OverflowError):
                    values[name] = ast.literal_eval(_Literals().visit(value))
                    continue
        code.append(ast.unparse(node)[:80])
    return values, code


class _Literals(ast.NodeTransformer):
    """Puts literals in place of ``dict(...)`` and ``float(...)``, and raises a ValueError at any other call."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match self.generic_visit(node):
            case ast.Call(ast.Name("dict"), [] | [ast.Dict()] as given, keywords):
                literal: Any = given[0] if given else ast.Dict([], [])
                # A dict that is unpacked has no key, and is no literal.
                literal.keys += [word.arg and ast.Constant(word.arg) for word in keywords]
                literal.values += [word.value for word in keywords]
                return literal
            case ast.Call(ast.Name("float"), [ast.Constant(str(value))], []):
                return ast.Constant(float(value))
        raise ValueError


def _code_in(values: dict[str, Any]) -> list[str]:
    """Return the modules that a config would import, by ``custom_imports`` or as the name of a class."""
    imports = several_of(section_of(values, "custom_imports"), "imports")
    code = [f"custom_imports {name}" for name in imports]
    for place, name in leaves(values):
        key = place.rpartition(".")[2]
        names_class = key in _NAMING
        if not isinstance(name, str) or not (names_class or key in ("_scope_", "default_scope")):
            continue
        package, dot, _ = name.partition(".")
        last = name_of_type(name)
        # A registry that has no class of a name imports a module of that name.
        is_module = names_class and last.isidentifier() and importlib.util.find_spec(last) is not None
        is_foreign = package not in _REGISTERED and (dot or not names_class)
        if is_module or is_foreign:
            code.append(f"{place}={name!r}")
    return code
