"""The placeholders of config files, which are those of mmengine.

* ``{{$NAME}}`` and ``{{$NAME:default}}`` in a text are the environment variable NAME. Outside of a text,
  ``{{'$NAME:80'}}`` is the number, list or other literal that the variable holds.
* ``{{fileDirname}}``, ``{{fileBasename}}``, ``{{fileBasenameNoExtension}}`` and ``{{fileExtname}}`` are parts of the
  path of the config.
* ``{{_base_.model.type}}`` is a value of the bases.

They are replaced in the parsed config, so that a value may contain quotes and backslashes.
"""

import ast
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from visdet.errors import ConfigError

BASE = "_base_"
_ANY = re.compile(r"\{\{\s*(.*?)\s*\}\}", re.DOTALL)
_IN_F_STRING = re.compile(r"\{\s*(\$.*?)\s*\}", re.DOTALL)  # Python has read {{ as an escaped brace there.
_OF_BASE = re.compile(rf"\{{\{{\s*({BASE}(?:\.\w+)+)\s*\}}\}}")
_LITERAL = re.compile(r"\{\{\s*(?P<quote>['\"])(?P<variable>\$.*?)(?P=quote)\s*\}\}")
_OUTSIDE_OF_TEXT = re.compile(rf"(?<!['\"\w/]){_LITERAL.pattern}|(?<!['\"\w/]){_OF_BASE.pattern}")
_VARIABLE = re.compile(r"\$(?P<name>\w+)\s*(?P<colon>:\s*(?P<default>.*))?", re.DOTALL)


class Placeholders(ast.NodeTransformer):
    """Replaces the placeholders of one config file.

    Args:
        path: the absolute path of the file.
    """

    def __init__(self, path: str) -> None:
        folder, name = os.path.split(path)
        stem, suffix = os.path.splitext(name)
        self._parts_of_path = {
            "fileDirname": folder.replace("\\", "/"),
            "fileBasename": name,
            "fileBasenameNoExtension": stem,
            "fileExtname": suffix,
        }
        self.environment: dict[str, str] = {}

    def text(self, text: str, pattern: re.Pattern = _ANY) -> str:
        """Return ``text`` without the placeholders of the environment and of the path."""
        return pattern.sub(lambda match: self._value_of(match[1], match[0]), text)

    def value(self, text: str, bases: Mapping[str, Any]) -> Any:
        """Return the value that a text of a JSON or YAML file stands for."""
        if match := _OF_BASE.fullmatch(text):
            value: Any = bases
            for key in match[1].split(".")[1:]:
                value = value[int(key) if isinstance(value, list | tuple) else key]
            return value
        if match := _LITERAL.fullmatch(text):
            return _literal(self._value_of(match["variable"], text))[0]
        return self.text(text)

    @staticmethod
    def as_texts(code: str) -> str:
        """Return JSON or YAML code in which the placeholders outside of texts are texts, for :meth:`value`."""
        return _OUTSIDE_OF_TEXT.sub(lambda match: json.dumps(match[0]), code)

    def _value_of(self, content: str, whole: str) -> str:
        content = content.strip("'\"") if content.strip("'\"").startswith("$") else content
        if not content.startswith("$"):
            return self._parts_of_path.get(content, whole)
        variable = _VARIABLE.fullmatch(content)
        if variable is None:
            raise ConfigError(f"{whole} must be {{{{$NAME}}}} or {{{{$NAME:default}}}}")
        name, default = variable["name"], variable["default"]
        if name in os.environ:
            self.environment[name] = os.environ[name]
            return os.environ[name]
        if not default:
            raise ConfigError(
                f"{whole} needs the environment variable {name}, which is not set. Set it, or write a default: "
                f"{{{{${name}:default}}}}"
            )
        return default

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Leave docstrings alone."""
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replace the placeholders in a text."""
        if not isinstance(node.value, str) or "{{" not in node.value:
            return node
        pieces = _OF_BASE.split(self.text(node.value))
        if len(pieces) == 1:
            return ast.Constant(pieces[0])
        if pieces[0] == pieces[2] == "" and len(pieces) == 3:
            return _expression(pieces[1])
        values: list[ast.expr] = [
            ast.FormattedValue(_expression(piece), -1) if number % 2 else ast.Constant(piece)
            for number, piece in enumerate(pieces)
        ]
        return ast.JoinedStr(values)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Replace the placeholders in an f-string."""
        for part in node.values:
            if isinstance(part, ast.Constant):
                part.value = self.text(str(part.value), _IN_F_STRING)
            else:
                self.visit(part)
        return node

    def visit_Set(self, node: ast.Set) -> ast.AST:
        """Replace a placeholder outside of a text, which Python reads as a set of a set."""
        inner = node.elts[0]
        content = inner.elts[0] if isinstance(inner, ast.Set) and len(inner.elts) == 1 else None
        if len(node.elts) == 1 and isinstance(content, ast.Constant) and str(content.value).startswith("$"):
            return _literal(self._value_of(str(content.value), ast.unparse(node)))[1]
        if len(node.elts) == 1 and content is not None and ast.unparse(content).startswith(f"{BASE}."):
            return content
        return self.generic_visit(node)


def rebuilt(value: Any, of_text: Callable[[str], Any] = str) -> Any:
    """Return ``value`` with new dicts, lists and tuples, and with ``of_text`` applied to each text.

    A dict that stands at several places of a config thus becomes several dicts.
    """
    if isinstance(value, dict):
        # The values of mmengine's dicts may be objects that are imported at the first look.
        return {key: rebuilt(item, of_text) for key, item in dict.items(value)}
    if type(value) in (list, tuple):
        return type(value)(rebuilt(item, of_text) for item in value)
    return of_text(value) if type(value) is str else value


def _expression(dotted: str) -> ast.expr:
    """Return the code that looks up a dotted path of ``_base_``, whose numbers are places in lists."""
    node: ast.expr = ast.Name(BASE, ast.Load())
    for key in dotted.split(".")[1:]:
        node = ast.Subscript(node, ast.Constant(int(key) if key.isdigit() else key), ast.Load())
    return node


def _literal(text: str) -> tuple[Any, ast.expr]:
    """Return the value of a literal and its code. Any other text is itself."""
    try:
        return ast.literal_eval(text), ast.parse(text, mode="eval").body
    except (ValueError, SyntaxError):
        return text, ast.Constant(text)
