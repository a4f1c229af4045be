"""Config files with their bases, in mmengine's format.

mmengine takes an import of Python's own modules for one of another package in a virtual environment, and needs
``pkg_resources`` for a base in a package. Its placeholders are these:

* ``{{$NAME}}`` and ``{{$NAME:default}}`` in a text are the environment variable NAME. Outside of a text,
  ``{{'$NAME:80'}}`` is the number, list or other literal that the variable holds.
* ``{{fileDirname}}``, ``{{fileBasename}}``, ``{{fileBasenameNoExtension}}`` and ``{{fileExtname}}`` are parts of the
  path of the config in a text.
* ``{{_base_.model.type}}`` is a value of the bases.

A Python config is a program, which is run when it is read. A JSON or YAML config runs the Python files among its bases,
which must be in its folder or in an installed package. What a config of any format names, such as the ``type`` of a
part, is imported and called when the part is built.
"""

import ast
import importlib.util
import json
import os
import re
import traceback
import types
from os.path import abspath, relpath, samefile
from pathlib import Path
from typing import Any

import mmengine
from mmengine.config import Config, ConfigDict

from visdet.errors import ConfigError, add_hint, hints_of
from visdet.files.yaml_text import load_yaml

from .packaged import PACKAGE, did_you_mean, existing_config, find_config, named_like
from .text import leaves

_BASE = "_base_"
_SUFFIXES = (".py", ".json", ".yaml", ".yml")
_HIDDEN = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_OF_BASE = re.compile(rf"(['\"]?)\{{\{{\s*{_BASE}\.([\w.]+)\s*\}}\}}\1")
_VARIABLE = re.compile(r"\{\{\s*(['\"]?)\s*\$(\w+)(?:\s*:\s*(.*?))?\s*\1\s*\}\}")
_PATH_PART = re.compile(r"\{\{\s*file(Dirname|BasenameNoExtension|Basename|Extname)\s*\}\}")
_PLAIN = re.compile(r"[\w./:@+-]*")  # what means the same in and outside of the quotes of JSON and YAML


def files_of_config(name: str, readers: tuple[str, ...] = ()) -> list[Path]:
    """Return the paths of a config and of the files that it inherits from, which are not run.

    A file that several others inherit from occurs as often.
    """
    path = existing_config(name)
    readers = (*readers, path)
    found = [Path(os.path.normpath(path))]
    for _, base, _ in _bases_of(_parsed(_text_of(path), path), readers):
        found += files_of_config(base, readers)
    return found


def read_config(path: str) -> Config:
    """Return the config at ``path``, merged with its bases.

    ``path`` may also be the name of one of the package's configs (see :func:`find_config`). A config is a Python
    program, or a JSON or YAML file. It inherits from the files that ``_base_`` names, where ``visdet::`` begins the
    names of the package's configs. Modules, functions and classes at its top level are not part of the result. mmengine
    reads configs that inherit by ``with read_base():``; imported names cannot be called in them.

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
        values = _read((path,), environment)
        return Config(values, cfg_text=_text_of(path), filename=path, env_variables=environment)
    except Exception as error:
        if isinstance(error, ConfigError) or hints_of(error):  # The hint is that of :func:`_told`.
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"config {_shown(path)} cannot be read: {type(error).__name__}: {reason}"
        ) from error


def _read(readers: tuple[str, ...], environment: dict[str, str]) -> dict[str, Any]:
    """Return the values of a config and of its bases, and note the environment variables that were used.

    Args:
        readers: the config that the user has named, the base that leads to this config, and so on to this config.
    """
    path = readers[-1]
    is_python = path.endswith(".py")
    text, marks = _marked(_text_of(path), path, environment)
    of_base = {}
    if is_python:
        text = _OF_BASE.sub(_base_in_python, text)
        content: Any = _Filling(marks, path).visit(_parsed(text, path))
    else:
        of_base = {f"{_BASE}{place}": place for _, place in _OF_BASE.findall(text)}
        content = _filled(_loaded(_OF_BASE.sub(rf'"{_BASE}\2"', text), path), marks)
    bases: dict[str, Any] = ConfigDict()
    for base, file, scope in _bases_of(content, readers):
        inherited = _read((*readers, file), environment)
        if twice := bases.keys() & inherited.keys():
            raise ConfigError(
                f"config {_shown(path)}: {base} and a base before it set {min(twice)!r}. Only one may"
            )
        bases.update(Config._dict_to_config_dict(ConfigDict(inherited), scope))
    values = _executed(content, path, bases) if is_python else content
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


def _base_in_python(match: re.Match) -> str:
    return re.sub(r"\.(\d+)", r"[\1]", f"({_BASE}.{match[2]})")


def _marked(text: str, path: str, environment: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the text of a config with marks in place of its placeholders, and the value of each mark.

    Values are put in after the text has been parsed, so that no quote or backslash in them changes what the text says.
    In JSON and YAML, simple values and literals replace their placeholders at once.
    """
    marks: dict[str, str] = {}
    is_python = path.endswith(".py")
    file = Path(abspath(path))
    parts = {"Dirname": file.parent.as_posix(), "Basename": file.name, "BasenameNoExtension": file.stem}
    parts["Extname"] = file.suffix

    def mark_of(value: str, is_literal: bool = False) -> str:
        if not is_python and (is_literal or _PLAIN.fullmatch(value)):
            return value
        mark = f"_value_{len(marks)}_of_config_"
        marks[mark] = value
        return mark

    def mark_of_part(match: re.Match) -> str:
        return mark_of(parts[match[1]])

    def mark_of_variable(match: re.Match) -> str:
        quote, name, default = match.groups()
        value = os.environ.get(name)
        if value is not None:
            environment[name] = value
        elif not default:
            raise ConfigError(
                f"config {_shown(path)}: {match[0]} needs the environment variable {name}, which is not set. Set it, "
                f"or write a default: {{{{${name}:default}}}}"
            )
        return mark_of(default if value is None else value, bool(quote))

    return _VARIABLE.sub(mark_of_variable, _PATH_PART.sub(mark_of_part, text)), marks


def _filled(content: Any, marks: dict[str, str]) -> Any:
    """Return the content of a JSON or YAML file, or a text of any file, with values in place of their marks."""
    match content:
        case str():
            for mark, value in marks.items():
                content = content.replace(mark, value)
        case dict():
            return {_filled(key, marks): _filled(value, marks) for key, value in content.items()}
        case list() | tuple():
            return type(content)(_filled(value, marks) for value in content)
    return content


class _Filling(ast.NodeTransformer):
    """Puts values in place of their marks into a Python config: texts into texts, and literals elsewhere."""

    def __init__(self, marks: dict[str, str], path: str) -> None:
        self.marks = marks
        self.path = path

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        node.value = _filled(node.value, self.marks)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.marks.get(node.id)
        if value is None:
            return node
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ConfigError(
                f"config {_shown(self.path)}, line {node.lineno}: outside of a text, a placeholder must stand for a "
                f"number, a list or another literal, got {value:.80}"
            ) from error
        return ast.copy_location(ast.parse(value.strip(), mode="eval").body, node)


def _parsed(text: str, path: str) -> ast.Module:
    return ast.parse(text, abspath(path))


def _loaded(text: str, path: str) -> dict[str, Any]:
    """Return the values of a JSON or YAML file, also of a YAML file in which mmengine has written tuples."""
    import yaml

    content = json.loads(text) if path.endswith(".json") else load_yaml(text, yaml.FullLoader)
    if not isinstance(content, dict):
        raise ConfigError(f"config {_shown(path)} must hold a dict")
    return content


def _bases_of(content: Any, readers: tuple[str, ...]) -> list[tuple[str, str, str | None]]:
    """Return what ``_base_`` of the last reader names: the name, the path and the scope of each base.

    Raises:
        ConfigError: there is no such base, it is one of the readers, or it is a program that they may not run.
    """
    first = readers[0]
    last = readers[-1]
    found = [(name, *_path_of_base(name, last)) for name in _names_of_bases(content)]
    are_python = any(reader.endswith(".py") for reader in readers)
    folder = Path(first).resolve().parent
    for name, path, _ in found:
        if any(samefile(path, reader) for reader in readers):
            chain = " > ".join(map(_shown, (*readers, path)))
            raise ConfigError(f"config {_shown(first)} inherits from itself: {chain}")
        is_near = Path(path).resolve().is_relative_to(folder)
        if path.endswith(".py") and not (are_python or "::" in name or is_near):
            raise ConfigError(
                f"config {_shown(first)}: its base {_shown(path)} is a program outside of its folder, which only a "
                "Python config may run. Copy the base to the folder, or write the config in Python"
            )
    return found


def _names_of_bases(content: Any) -> list[str]:
    """Return what ``_base_`` names, and remove it from the content of a config."""
    bases: Any = []
    if isinstance(content, dict):
        bases = content.pop(_BASE, [])
    else:
        body = content.body
        for node in list(body):
            match node:
                case ast.Assign(targets=[ast.Name("_base_")], value=names):
                    bases = eval(compile(ast.Expression(names), _BASE, "eval"), {})
                    body.remove(node)
    return [bases] if isinstance(bases, str) else list(bases)


def _path_of_base(base: str, reader: str) -> tuple[str, str | None]:
    """Return the path of a base and the scope of its package, if it is written ``package::path``."""
    if base.startswith(PACKAGE):
        return existing_config(base), None
    package, mark, inside = base.rpartition("::")
    folder = _configs_of(package) if mark else Path(abspath(reader)).parent
    near: list[str] = []
    reason = f"its base {base} is in a package that is not installed"
    if folder is not None:
        file = folder / inside
        if file.is_file():
            return str(file), package or None
        near = [package + mark + relpath(path, folder) for path in named_like(file, folder)]
        reason = f"there is no base {file}. A path in {_BASE} is relative to the folder of the file that it stands in"
    of_package = PACKAGE + inside.lstrip("./")
    hint = did_you_mean([of_package] if find_config(of_package) else near)
    raise ConfigError(f"config {_shown(reader)}: {reason}{hint}")


def _configs_of(package: str) -> Path | None:
    """Return the folder of the configs of a package, which is not imported, or None if it is not installed."""
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = found.submodule_search_locations if found else None
    return Path(next(iter(folders)), ".mim", "configs") if folders else None


def _executed(tree: ast.Module, path: str, bases: dict[str, Any]) -> dict[str, Any]:
    """Run a config and return its values."""
    place = abspath(path)
    names: dict[str, Any] = {_BASE: bases, "__file__": place, "__name__": "config"}
    try:
        exec(compile(tree, place, "exec"), names)
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
    shown = _shown(path)
    file = last.filename
    if file == abspath(path):
        place = f"({shown}, line {last.lineno})"
        return ConfigError(f"config {shown} cannot be read: {type(error).__name__}: {error} {place}")
    if not file.startswith(os.path.dirname(mmengine.__file__)) or str(error).startswith("Failed to"):
        add_hint(error, f"while reading the config {shown}")
    return error


def _read_lazily(path: str) -> Config:
    """Return a config that mmengine reads, whose imported names stand for what they import."""
    try:
        cfg = Config.fromfile(abspath(path), import_custom_modules=False, lazy_import=True)
        list(leaves(cfg._cfg_dict))  # mmengine imports what a value names when the value is read.
    except Exception as error:
        if isinstance(error, RuntimeError) and not str(error):
            raise ConfigError(
                f"config {path} calls a name that it imports. Beside read_base, an import gives its value only when a "
                f"part is built. Write `{_BASE} = []` instead of read_base, and an import works as in any program"
            ) from error
        raise (error if isinstance(error, ImportError) else _told(error, path)) from error.__cause__
    object.__setattr__(cfg, "_filename", path)
    return cfg


def _is_lazy(tree: ast.Module) -> bool:
    """Return whether a config inherits by ``with read_base():``, so that mmengine must read it."""
    return any("read_base" in ast.unparse(node) for node in tree.body if isinstance(node, ast.With))


def _shown(path: str) -> str:
    """Return the shorter one of a path and the same path from the current folder."""
    return min(path, relpath(path), key=len)
