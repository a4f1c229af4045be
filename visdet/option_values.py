"""The values of ``--cfg-options``, which follow one grammar.

| text | value |
|---|---|
| ``3``, ``1e-4``, ``inf``, ``True``, ``false``, ``None`` | the number, the truth value, None |
| ``'3'``, ``"a, b"`` | the text between the quotes, without escapes |
| ``[a, 'b c']``, ``(1, 2)``, ``{'k': 1}``, ``dict(k=1)`` | a list, a tuple, dicts of such values |
| ``a, b`` | a list |
| anything else, such as ``007`` or ``my folder (1)/x`` | the text itself |
"""

import re
from typing import Any

_CLOSING = {"[": "]", "(": ")", "{": "}"}
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(
    r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][+-]?[0-9]+)?|[+-]?(inf|nan)", re.IGNORECASE
)
_CALL = re.compile(r"([A-Za-z_][\w.]*)\((.*)\)", re.DOTALL)


def option_value(text: str) -> Any:
    """Return the value that a text of the command line stands for.

    Raises:
        ValueError: a bracket is not closed, or a dict or a call cannot be read. The message says which.
    """
    text = text.strip()
    if _is_quoted(text) and (inner := text[1:-1].strip())[:1] in _CLOSING and _bracketed(inner):
        text = inner  # Some shells leave the quotes that keep the brackets from them.
    parts = _split(text, ",")
    if len(parts) > 1:
        return [option_value(part) for part in _without_last_comma(parts)]
    return _single_value(text)


def _single_value(text: str) -> Any:
    if _is_quoted(text):
        return text[1:-1]
    if text[:1] in _CLOSING and _bracketed(text):
        return _collection(text)
    call = _CALL.fullmatch(text)
    if call and _bracketed(text[len(call[1]) :]):
        if call[1] == "dict":
            return _dict(call[2], "=", text)
        if re.search("[=,]", call[2]):
            raise ValueError(
                f"{text!r} is a call. Write dict(type='{call[1]}', ...), or put text into quotes"
            )
    if text == "None":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _collection(text: str) -> Any:
    inner = text[1:-1]
    if text[0] == "{":
        return _dict(inner, ":", text)
    items = [option_value(part) for part in _without_last_comma(_split(inner, ","))]
    return tuple(items) if text[0] == "(" else items


def _dict(inner: str, sign: str, whole: str) -> dict:
    found = {}
    for item in _without_last_comma(_split(inner, ",")):
        key, *values = _split(item, sign, 1)
        key = _single_value(key.strip()) if sign == ":" else key.strip()
        if not values or (sign == "=" and not str(key).isidentifier()):
            expected = "'key': value" if sign == ":" else "key=value"
            raise ValueError(f"{whole!r}: expected {expected}, got {item.strip()!r}")
        found[key] = option_value(values[0])
    return found


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] in "'\"" and text.find(text[0], 1) == len(text) - 1


def _bracketed(text: str) -> bool:
    """Return whether the bracket that a text begins with is closed by its last character.

    Raises:
        ValueError: the bracket is never closed.
    """
    closed = next((place for place, depth, _ in _walk(text) if depth == 0), None)
    if closed is None:
        raise ValueError(f"{text!r}: the bracket {text[0]!r} is not closed")
    return closed == len(text) - 1


def _split(text: str, sign: str, count: int = -1) -> list[str]:
    """Return the parts of a text between the signs that stand outside of brackets and quotes."""
    parts: list[str] = []
    begin = 0
    for place, depth, character in _walk(text):
        if character == sign and depth == 0 and len(parts) != count:
            parts.append(text[begin:place])
            begin = place + 1
    return [*parts, text[begin:]]


def _walk(text: str) -> Any:
    """Yield the place of every character that is not quoted, the depth of brackets after it, and the character.

    A quote counts only at the beginning of an item, so that a word may contain one.
    """
    depth, place, at_beginning = 0, 0, True
    while place < len(text):
        character = text[place]
        if at_beginning and character in "'\"" and (end := text.find(character, place + 1)) > 0:
            place = end + 1
            at_beginning = False
            continue
        depth += (character in _CLOSING) - (character in _CLOSING.values())
        yield place, depth, character
        at_beginning = character in "[({,:=" or (at_beginning and character.isspace())
        place += 1


def _without_last_comma(parts: list[str]) -> list[str]:
    return parts if parts[-1].strip() else parts[:-1]
