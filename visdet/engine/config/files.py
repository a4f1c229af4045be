"""Config files with their bases, in mmengine's format."""

import ast
import io
import json
import os
import sys
import tokenize
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mmengine
from mmengine.config import Config, ConfigDict

from visdet.errors import ConfigError, add_hint

from .packaged import PACKAGE, did_you_mean, existing_config, named_like
from .placeholders import BASE, Placeholders, rebuilt

_SUFFIXES = (".py", ".json", ".yaml", ".yml")
_DEPRECATION = "_deprecation_"
_Value = dict[str, Any]


def files_of_config(name: str) -> list[Path]:
    """Return the paths of a config and of the files that it inherits from, which need not be read to their end."""
    path = existing_config(name)
    found = [Path(os.path.normpath(path))]
    for base in _names_of_bases(_parsed(_text_of(path), path), Placeholders(os.path.abspath(path))):
        found += files_of_config(_path_of_base(base, os.path.abspath(path))[0])
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
    text = _text_of(path)
    if path.endswith(".py") and _is_lazy(_parsed(text, path)):
        return _read_lazily(path)
    values, environment = _read(path, text, ())
    try:
        return Config(values, cfg_text=text, filename=path, env_variables=environment)
    except KeyError as error:
        raise ConfigError(f"config {path}: the key {error.args[0]}; choose another name") from error


def _read(path: str, text: str, readers: tuple[str, ...]) -> tuple[_Value, dict[str, str]]:
    """Return the values of a config and of its bases, and the environment variables that were used.

    Args:
        readers: the configs that inherit from this one, the outermost first.
    """
    absolute = os.path.abspath(path)
    placeholders = Placeholders(absolute)
    bases: _Value = ConfigDict()
    environment: dict[str, str] = {}
    owners: dict[str, str] = {}
    try:
        content: Any = (
            placeholders.visit(_parsed(text, path)) if path.endswith(".py") else _loaded(text, path)
        )
        for base in _names_of_bases(content, placeholders):
            file, scope = _path_of_base(base, absolute)
            if os.path.realpath(file) in map(os.path.realpath, (*readers, absolute)):
                raise ConfigError(f"_base_ forms a circle: {base} inherits from this config")
            values, used = _read(file, _text_of(file), (*readers, absolute))
            environment |= used
            if twice := bases.keys() & values.keys():
                key = min(twice)
                raise ConfigError(f"two bases set {key!r}: {owners[key]} and {base}. Only one of them may")
            owners |= dict.fromkeys(values, base)
            bases.update(Config._dict_to_config_dict(ConfigDict(values), scope))
        if path.endswith(".py"):
            values = _executed(content, path, bases)
        else:
            values = rebuilt(content, lambda text: placeholders.value(text, bases))
    except ConfigError as error:
        if str(error).startswith("config "):
            raise
        raise ConfigError(f"config {_shown(path)}: {error}") from error.__cause__
    # The base has made its visualizer of its own ``vis_backends``.
    if "vis_backends" in values and "visualizer" not in values and isinstance(bases.get("visualizer"), dict):
        values["visualizer"] = {"vis_backends": values["vis_backends"]}
    Config._parse_scope(values)
    _warn_of_deprecation(values.pop(_DEPRECATION, None), path)
    try:
        merged = Config._merge_a_into_b(rebuilt(values), bases)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"config {_shown(path)} does not fit its bases: {error}") from error
    return merged, environment | placeholders.environment


def _text_of(path: str) -> str:
    """Return the text of a file in UTF-8, or in the encoding that its first line declares."""
    if not path.endswith(_SUFFIXES):
        raise ConfigError(f"config {path} must end in {', '.join(_SUFFIXES)}")
    try:
        content = Path(path).read_bytes()
        encoding = (
            tokenize.detect_encoding(io.BytesIO(content).readline)[0] if path.endswith(".py") else "utf-8-sig"
        )
        return content.decode(encoding)
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read: {error.strerror or error}") from error
    except (UnicodeError, SyntaxError) as error:
        raise ConfigError(f"config {path} is not a text in UTF-8; save it in that encoding") from error


def _parsed(text: str, path: str) -> ast.Module:
    try:
        return ast.parse(text, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = (
            f" (line {error.lineno}: {(error.text or '').strip()})" if isinstance(error, SyntaxError) else ""
        )
        message = getattr(error, "msg", None) or str(error)
        raise ConfigError(
            f"config {_shown(path)} cannot be read: {type(error).__name__}: {message}{line}"
        ) from error


def _loaded(text: str, path: str) -> _Value:
    """Return the values of a JSON or YAML file, also of a YAML file in which mmengine has written tuples."""
    import yaml

    class Loader(yaml.SafeLoader):
        def tuple_of(self, node: Any) -> tuple:
            return tuple(self.construct_sequence(node, deep=True))

    Loader.add_constructor("tag:yaml.org,2002:python/tuple", Loader.tuple_of)
    text = Placeholders.as_texts(text)
    try:
        content = json.loads(text) if path.endswith(".json") else yaml.load(text, Loader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"config {_shown(path)} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"config {_shown(path)} must hold a dict with names as keys")
    return content


def _names_of_bases(content: Any, placeholders: Placeholders) -> list[str]:
    """Return what ``_base_`` names, and remove it from the content of a config."""
    if isinstance(content, dict):
        bases: Any = rebuilt(content.pop(BASE, []), placeholders.text)
    else:
        code = list(_assignments_of_base(content))
        if not code:
            return []
        if len(code) > 1 or code[0] not in content.body or code[0].value is None:
            raise ConfigError(f"{BASE} must be set once and at the top level (line {code[-1].lineno})")
        content.body.remove(code[0])
        expression = ast.fix_missing_locations(ast.Expression(code[0].value))
        try:
            bases = eval(compile(expression, BASE, "eval"), {})
        except Exception as error:
            raise ConfigError(
                f"{BASE} must be a list of paths that uses no names of the config: {type(error).__name__}: {error}"
            ) from error
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list | tuple) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{BASE} must be a path or a list of paths, got {bases!r}")
    return list(bases)


def _assignments_of_base(tree: ast.Module) -> Iterator[Any]:
    for node in ast.walk(tree):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        is_set = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        if is_set and any(isinstance(target, ast.Name) and target.id == BASE for target in targets):
            yield node


def _path_of_base(base: str, reader: str) -> tuple[str, str | None]:
    """Return the path of a base and the scope of its package, if it is written ``package::path``."""
    if base.startswith(PACKAGE):  # mmengine needs pkg_resources for it, which setuptools no longer has.
        return existing_config(base), None
    try:
        file, scope = Config._get_cfg_path(base, reader)
    except (
        Exception
    ) as error:  # mmengine raises many kinds of errors for packages that are not as it expects.
        if isinstance(error, ModuleNotFoundError) and error.name == "pkg_resources":
            raise ConfigError(
                "a base written `package::path` needs pkg_resources, which setuptools no longer has; write the base "
                "as a relative path"
            ) from error
        raise ConfigError(f"the base {base} cannot be found: {type(error).__name__}: {error}") from error
    if not os.path.isfile(file):
        folder = Path(reader).parent
        near = [os.path.relpath(found, folder) for found in named_like(file, folder)]
        what = f"the base {file} is a folder" if os.path.isdir(file) else f"there is no base {file}"
        raise ConfigError(
            f"{what}. A path in {BASE} is relative to the folder of the file that it stands in{did_you_mean(near)}"
        )
    return file, scope


def _executed(tree: ast.Module, path: str, bases: _Value) -> _Value:
    """Run a config and return its values."""
    names: _Value = {BASE: bases, "__file__": os.path.abspath(path), "__name__": "config"}
    try:
        exec(compile(ast.fix_missing_locations(tree), os.path.abspath(path), "exec"), names)
    except (Exception, SystemExit) as error:  # A config is a program and may raise any error.
        _raise_as_config_error(error, path)
    hidden = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    return {
        name: value
        for name, value in names.items()
        if name != BASE and not name.startswith("__") and not isinstance(value, hidden)
    }


def _raise_as_config_error(error: BaseException, path: str) -> None:
    """Raise a ConfigError if a config or mmengine raised an error, and the error itself if code of the user did."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    in_config = last.filename == os.path.abspath(path)
    if not in_config and not last.filename.startswith(os.path.dirname(mmengine.__file__)):
        add_hint(error, f"while reading the config {_shown(path)}")
        raise error
    place = f" ({_shown(path)}, line {last.lineno})" if in_config else ""
    raise ConfigError(
        f"config {_shown(path)} cannot be read: {type(error).__name__}: {error}{place}"
    ) from error


def _is_lazy(tree: ast.Module) -> bool:
    """Return whether mmengine must read a config, since it has no ``_base_`` and imports configs or packages."""
    own = {*sys.stdlib_module_names, "mmengine"}
    imported, reads_base = set(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            reads_base |= any("read_base" in ast.unparse(item.context_expr) for item in node.items)
        elif isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." if node.level else str(node.module).split(".")[0])
    return reads_base or (not any(_assignments_of_base(tree)) and not imported <= own)


def _read_lazily(path: str) -> Config:
    """Return a config that mmengine reads, whose imported names stand for what they import."""
    absolute = os.path.abspath(path)
    try:
        cfg = Config.fromfile(absolute, import_custom_modules=False, lazy_import=True)
        for key, value in list(dict.items(cfg._cfg_dict)):
            cfg._cfg_dict[key] = rebuilt(value, Placeholders(absolute).text)
        object.__setattr__(cfg, "_filename", path)
        _look_up(cfg._cfg_dict)
        return cfg
    except Exception as error:
        if isinstance(error, RuntimeError) and not str(error):
            raise ConfigError(
                f"config {path} calls a name that it imports. Without {BASE}, an import gives its value only when a "
                f"part is built. Write `{BASE} = []` instead of read_base, and an import works as in any program"
            ) from error
        if isinstance(error, ImportError) or not str(error).startswith("Failed to import "):
            _raise_as_config_error(error, path)
        raise


def _look_up(value: Any) -> None:
    """Import what a config names, which mmengine does when a value is read."""
    is_list = isinstance(value, list | tuple)
    for item in value.values() if isinstance(value, dict) else value if is_list else ():
        _look_up(item)


def _warn_of_deprecation(notice: Any, path: str) -> None:
    if notice:
        expected = (
            f"; use {notice['expected']} instead" if isinstance(notice, dict) and "expected" in notice else ""
        )
        warnings.warn(f"config {_shown(path)} is deprecated{expected}", DeprecationWarning, stacklevel=3)


def _shown(path: str) -> str:
    """Return the shorter one of a path and the same path from the current folder."""
    return min(path, os.path.relpath(path), key=len)
