"""The names and the colours of classes in the meta information of data sets and checkpoints."""

from collections.abc import Collection, Sequence
from typing import Annotated, Any

from visdet.checks.arguments import Range, checked_value
from visdet.errors import InvalidInputError

from .palette import class_palette

_Shade = Annotated[int, Range(0, 255)]

__all__ = ["checked_classes", "checked_names"]


def checked_names(what: str, names: Any) -> tuple[str, ...]:
    """Return names as a tuple. A single text, whose letters would be taken for names, is refused.

    Raises:
        InvalidInputError: a name is no text or occurs twice, or ``names`` is a text. The message begins with ``what``.
    """
    is_listed = isinstance(names, Collection) and not isinstance(names, str | bytes | dict | set)
    if not is_listed or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        kind = "class" if "classes" in what else "name"
        hint = f"; for one {kind} write ({names!r},)" if isinstance(names, str) else ""
        raise InvalidInputError(f"{what} must be a tuple of distinct names, got {names!r:.200}{hint}")
    return tuple(names)


def checked_classes(metainfo: Any, owner: str) -> dict[str, Any]:
    """Return meta information with ``classes``, a tuple of names, and ``palette``, a list of a colour for each.

    Args:
        metainfo: a dict with ``classes``, a list of texts, and ``palette``, a list of (red, green, blue) from 0 to 255.
            Without a palette, or if it is ``'random'``, colours are generated.
        owner: what has the meta information, with which a message begins.

    Raises:
        InvalidInputError: the names or the colours are something else.
    """
    if not isinstance(metainfo, dict):
        raise InvalidInputError(f"{owner} must be a dict with the key 'classes', got {metainfo!r:.200}")
    classes = checked_names(f"{owner}['classes']", metainfo.get("classes"))
    palette = metainfo.get("palette")
    if palette is None or (isinstance(palette, str) and palette == "random"):
        palette = class_palette(len(classes))
    palette = checked_value(f"{owner}['palette']", palette, Sequence[tuple[_Shade, _Shade, _Shade]])
    if len(palette) < len(classes):
        raise InvalidInputError(
            f"{owner}['palette'] must have a colour for each of {len(classes)} classes, got {len(palette)}"
        )
    return {**metainfo, "classes": classes, "palette": [tuple(colour) for colour in palette]}
