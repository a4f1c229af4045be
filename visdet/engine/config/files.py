"""Config files with their bases, in mmengine's format.

mmengine takes an import of Python's own modules for one of another package in a virtual environment, and needs
``pkg_resources`` for a base in a package. Its placeholders are these:

* ``{{$NAME}}`` and ``{{$NAME:default}}`` in a text are the environment variable NAME. Outside of a text,
  ``{{'$NAME:80'}}`` is the number, list or other literal that the variable holds.
* ``{{fileDirname}}``, ``{{fileBasename}}``, ``{{fileBasenameNoExtension}}`` and ``{{fileExtname}}`` are parts of the
  path of the config.
* ``{{_base_.model.type}}`` is a value of the bases.
"""

import ast
import json
import os
import re
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import mmengine
from mmengine.config import Config, ConfigDict

from visdet.errors import ConfigError, add_hint, hints_of

from .packaged import PACKAGE, did_you_mean, existing_config, named_like

_BASE = "_base_"
_SUFFIXES = (".py", ".json", ".yaml", ".yml")
_HIDDEN = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_OF_BASE = re.compile(rf"(['\"]?)\{{\{{\s*{_BASE}\.([\w.]+)\s*\}}\}}\1")
_VARIABLE = re.compile(r"\{\{\s*(['\"]?)\s*\$(\w+)(?:\s*:\s*(.*?))?\s*\1\s*\}\}")


def files_of_config(name: str) -> list[Path]:
    """Return the paths of a config and of the files that it inherits from, which are not run."""
    path = existing_config(name)
    found = [Path(os.path.normpath(path))]
    for base in _names_of_bases(_parsed(_text_of(path), path)):
        found += files_of_config(_path_of_base(base, path)[0])
    return list(dict.fromkeys(found))


def read_config(path: str) -> Config:
    """Return the config at ``path``, merged with its bases.

    ``path`` may also be the name of one of the package's configs (see :func:`find_config`). A config is a Python
    program, or a JSON or YAML file. It inherits from the files that ``_base_`` names, where ``visdet::`` begins the
    names of the package's configs. Modules, functions and classes at its top level are not part of the result. mmengine
    reads configs that inherit by ``with read_base():`` or that import other packages than Python's own and have no
    ``_base_``; imported names cannot be called in them.

    Raises:
        ConfigError: the file or one of its bases does not exist or cannot be read. The message names the file and, if
            there is one, the line.
        Exception: any error of a module of the user that the config imports.
    """
    path = existing_config(path)
    try:
        if path.endswith(".py") and _is_lazy(_parsed(_text_of(path), path)):
            return _read_lazily(path)
        environment: dict[str, str] = {}
        values = _read(path, environment)
        return Config(values, cfg_text=_text_of(path), filename=path, env_variables=environment)
    except Exception as error:
        if isinstance(error, ConfigError) or hints_of(error):  # The hint is that of :func:`_told`.
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"config {_shown(path)} cannot be read: {type(error).__name__}: {reason}"
        ) from error


def _read(path: str, environment: dict[str, str]) -> dict[str, Any]:
    """Return the values of a config and of its bases, and note the environment variables that were used."""
    text, of_base = _substituted(_text_of(path), path, environment), {}
    if path.endswith(".py"):
        text = _OF_BASE.sub(lambda match: re.sub(r"\.(\d+)", r"[\1]", f"({_BASE}.{match[2]})"), text)
        content: Any = _parsed(text, path)
    else:
        of_base = {f"{_BASE}{match[2]}": match[2] for match in _OF_BASE.finditer(text)}
        content = _loaded(_OF_BASE.sub(lambda match: f'"{_BASE}{match[2]}"', text), path)
    bases: dict[str, Any] = ConfigDict()
    for base in _names_of_bases(content):
        file, scope = _path_of_base(base, path)
        inherited = _read(file, environment)
        if twice := bases.keys() & inherited.keys():
            raise ConfigError(
                f"config {_shown(path)}: {base} and a base before it set {min(twice)!r}. Only one may"
            )
        bases.update(Config._dict_to_config_dict(ConfigDict(inherited), scope))
    values = _executed(content, path, bases) if path.endswith(".py") else content
    # The base has made its visualizer of its own ``vis_backends``.
    if "vis_backends" in values and "visualizer" not in values and isinstance(bases.get("visualizer"), dict):
        values["visualizer"] = {"vis_backends": values["vis_backends"]}
    Config._parse_scope(values)
    # The copies make several dicts of one that stands at several places.
    return Config._merge_a_into_b(Config._substitute_base_vars(values, of_base, bases), bases)


def _text_of(path: str) -> str:
    if not path.endswith(_SUFFIXES):
        raise ConfigError(f"config {path} must end in {', '.join(_SUFFIXES)}")
    return Path(path).read_text("utf-8-sig")


def _substituted(text: str, path: str, environment: dict[str, str]) -> str:
    """Return the text of a config without the placeholders of the environment and of the path."""
    file = Path(os.path.abspath(path))
    parts = {"Dirname": file.parent.as_posix(), "Basename": file.name, "BasenameNoExtension": file.stem}
    for name, part in {**parts, "Extname": file.suffix}.items():
        text = re.sub(rf"\{{\{{\s*file{name}\s*\}}\}}", part.replace("\\", r"\\"), text)

    def value_of(match: re.Match) -> str:
        _, name, default = match.groups()
        if name in os.environ:
            environment[name] = os.environ[name]
        elif not default:
            raise ConfigError(
                f"config {_shown(path)}: {match[0]} needs the environment variable {name}, which is not set. Set it, "
                f"or write a default: {{{{${name}:default}}}}"
            )
        value = environment.get(name, default)
        return value if match[1] else json.dumps(value, ensure_ascii=False)[1:-1].replace("'", "\\u0027")

    return _VARIABLE.sub(value_of, text)


def _parsed(text: str, path: str) -> ast.Module:
    return ast.parse(text, os.path.abspath(path))


def _loaded(text: str, path: str) -> dict[str, Any]:
    """Return the values of a JSON or YAML file, also of a YAML file in which mmengine has written tuples."""
    import yaml

    content = json.loads(text) if path.endswith(".json") else yaml.full_load(text)
    if not isinstance(content, dict):
        raise ConfigError(f"config {_shown(path)} must hold a dict")
    return content


def _names_of_bases(content: Any) -> list[str]:
    """Return what ``_base_`` names, and remove it from the content of a config."""
    bases: Any = []
    if isinstance(content, dict):
        bases = content.pop(_BASE, [])
    for assignment in _assignments_of_base(content) if isinstance(content, ast.Module) else ():
        bases = eval(compile(ast.Expression(assignment.value), _BASE, "eval"), {})
        content.body.remove(assignment)
    return [bases] if isinstance(bases, str) else list(bases)


def _assignments_of_base(tree: ast.Module) -> list[Any]:
    return [
        node
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == _BASE for target in node.targets)
    ]


def _path_of_base(base: str, reader: str) -> tuple[str, str | None]:
    """Return the path of a base and the scope of its package, if it is written ``package::path``."""
    if base.startswith(PACKAGE):
        return existing_config(base), None
    file, scope = Config._get_cfg_path(base, os.path.abspath(reader))
    if not os.path.isfile(file):
        folder = Path(os.path.abspath(reader)).parent
        near = [os.path.relpath(found, folder) for found in named_like(file, folder)]
        raise ConfigError(
            f"config {_shown(reader)}: there is no base {file}. A path in {_BASE} is relative to the folder of the "
            f"file that it stands in{did_you_mean(near)}"
        )
    return file, scope


def _executed(tree: ast.Module, path: str, bases: dict[str, Any]) -> dict[str, Any]:
    """Run a config and return its values."""
    names: dict[str, Any] = {_BASE: bases, "__file__": os.path.abspath(path), "__name__": "config"}
    try:
        exec(compile(tree, os.path.abspath(path), "exec"), names)
    except (Exception, SystemExit) as error:  # A config is a program and may raise any error.
        raise _told(error, path) from error.__cause__
    if names[_BASE] is not bases:
        raise ConfigError(f"config {_shown(path)}: {_BASE} must be set once and at the top level")
    return {
        name: value
        for name, value in names.items()
        if name != _BASE and not name.startswith("__") and not isinstance(value, _HIDDEN)
    }


def _told(error: BaseException, path: str) -> BaseException:
    """Return a ConfigError if a config raised an error, and the error with a hint if code of the user did."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename == os.path.abspath(path):
        place = f"({_shown(path)}, line {last.lineno})"
        return ConfigError(f"config {_shown(path)} cannot be read: {type(error).__name__}: {error} {place}")
    if not last.filename.startswith(os.path.dirname(mmengine.__file__)) or str(error).startswith("Failed to"):
        add_hint(error, f"while reading the config {_shown(path)}")
    return error


def _read_lazily(path: str) -> Config:
    """Return a config that mmengine reads, whose imported names stand for what they import."""
    try:
        cfg = Config.fromfile(os.path.abspath(path), import_custom_modules=False, lazy_import=True)
        _look_up(cfg._cfg_dict)
    except Exception as error:
        if isinstance(error, RuntimeError) and not str(error):
            raise ConfigError(
                f"config {path} calls a name that it imports. Without {_BASE}, an import gives its value only when a "
                f"part is built. Write `{_BASE} = []` instead of read_base, and an import works as in any program"
            ) from error
        raise (error if isinstance(error, ImportError) else _told(error, path)) from error.__cause__
    object.__setattr__(cfg, "_filename", path)
    return cfg


def _is_lazy(tree: ast.Module) -> bool:
    """Return whether mmengine must read a config, since it has no ``_base_`` and imports configs or packages."""
    own = {*sys.stdlib_module_names, "mmengine"}
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and "read_base" in ast.unparse(node.items[0]):
            return True
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." if node.level else str(node.module).split(".")[0])
    return not _assignments_of_base(tree) and not imported <= own


def _look_up(value: Any) -> None:
    """Import what a config names, which mmengine does when a value is read."""
    is_list = isinstance(value, list | tuple)
    for item in value.values() if isinstance(value, dict) else value if is_list else ():
        _look_up(item)


def _shown(path: str) -> str:
    """Return the shorter one of a path and the same path from the current folder."""
    return min(path, os.path.relpath(path), key=len)
