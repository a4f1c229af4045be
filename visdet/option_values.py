"""The values of ``--cfg-options``: Python's numbers and collections, in which words need no quotes.

| text | value |
|---|---|
| ``3``, ``1e-4``, ``inf``, ``True``, ``false``, ``None`` | the number, the truth value, None |
| ``'3'``, ``"a, b"`` | the text between the quotes, without escapes |
| ``[a, 'b c']``, ``(1, 2)``, ``{'k': 1}``, ``dict(k=1)`` | a list, a tuple, dicts of such values |
| ``a, b`` | a list |
| anything else, such as ``007`` or ``my folder (1)/x`` | the text itself |
"""

import argparse
import ast
import re
from typing import Any

_CLOSING = {"[": "]", "(": ")", "{": "}", "d": ")"}  # the last one is that of dict(...)
_QUOTED = re.compile(r"(['\"])((?:(?!\1).)*)\1", re.DOTALL)  # without such a quote within
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_NOT_FINITE = re.compile(r"[+-]?(inf|nan)", re.IGNORECASE)
_TRUTH = {"true": True, "false": False}


def option_value(text: str) -> Any:
    """Return the value that a text of the command line stands for.

    Raises:
        ValueError: a list, a tuple or a dict cannot be read. The message says which.
    """
    text = text.strip()
    if quoted := _QUOTED.fullmatch(text):
        inner = quoted[2]  # Some shells leave the quotes that keep brackets from them.
        return option_value(inner) if inner.lstrip().startswith(("[", "(", "{")) else inner
    source = text.replace("\\", "\\\\")
    try:
        node = ast.parse(source, mode="eval").body
    except SyntaxError:
        is_collection = text.startswith(("[", "(", "{", "dict("))
        is_closed = sum(map(text.count, "[({")) == sum(map(text.count, "])}"))
        if is_collection and (text[-1] == _CLOSING[text[0]] or not is_closed):
            raise ValueError(
                f"{text!r} is no list, tuple or dict: close its brackets, and put its texts into quotes"
            ) from None
        parts = text.removesuffix(",").split(",")
        return [option_value(part) for part in parts] if "," in text else text
    value = _value(node, source)
    return text if "#" in text and "#" not in str(value) else value  # It would begin a comment of Python's.


def _value(node: Any, source: str) -> Any:
    text = str(ast.get_source_segment(source, node))
    match node:
        case ast.Constant(value=str() | None):
            return node.value
        case ast.List() | ast.Tuple():
            items = [_value(item, source) for item in node.elts]
            has_brackets = not items or node.elts[0].col_offset > node.col_offset
            return tuple(items) if isinstance(node, ast.Tuple) and has_brackets else items
        case ast.Dict(keys, values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {_value(key, source): _value(value, source) for key, value in pairs}
        case ast.Call(ast.Name("dict"), [], keywords) if all(item.arg for item in keywords):
            return {item.arg: _value(item.value, source) for item in keywords}
        case (
            ast.Dict()
            | ast.Set()
            | ast.Call(ast.Name("dict"))
            | ast.Call(args=[_, _, *_])
            | ast.Call(keywords=[_, *_])
        ):
            raise ValueError(
                f"{text!r}: write dict(type='NAME', key=value) or {{'key': value}}, or put text into quotes"
            )
    if _NUMBER.fullmatch(text):
        return ast.literal_eval(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text)
    return _TRUTH.get(text.lower(), text.replace("\\\\", "\\"))


class CfgOptions(argparse.Action):
    """The argparse action for ``--cfg-options KEY=VALUE ...``. :func:`option_value` reads the values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        options = dict(getattr(namespace, self.dest) or {})
        for pair in values:
            key, sign, value = pair.partition("=")
            if not sign or not all(key.split(".")):
                raise argparse.ArgumentError(self, f"expected KEY=VALUE, got {pair!r}")
            try:
                options[key] = option_value(value)
            except (ValueError, RecursionError) as error:
                reason = "too many brackets" if isinstance(error, RecursionError) else error
                raise argparse.ArgumentError(self, f"cannot read {pair!r}: {reason}") from error
        setattr(namespace, self.dest, options)
