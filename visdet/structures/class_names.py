"""The names of classes and their colours, and the checks of names."""

import colorsys
from collections.abc import Collection, Sequence
from typing import Annotated, Any

from visdet.checks.arguments import Range, checked_value
from visdet.errors import InvalidInputError

_GOLDEN_RATIO = 0.618033988749895


def class_palette(num_classes: int) -> list[tuple[int, int, int]]:
    """Return ``num_classes`` RGB colours in 0..255, each with a hue far from those before it.

    The hue advances by the golden ratio, so that any prefix of the list is spread over the colour wheel. Saturation and
    value alternate, so that similar hues of a long list still differ. A class has the same colour in every run.
    """
    colours = []
    for i in range(num_classes):
        hue = (0.02 + i * _GOLDEN_RATIO) % 1.0
        saturation = (0.85, 0.65, 0.95)[i % 3]
        value = (1.0, 0.9, 0.8)[(i // 3) % 3]
        red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
        colours.append((round(red * 255), round(green * 255), round(blue * 255)))
    return colours


_Shade = Annotated[int, Range(0, 255)]


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
    palette, number = metainfo.get("palette"), len(classes)
    if palette is None or (isinstance(palette, str) and palette == "random"):
        palette = class_palette(number)
    palette = checked_value(f"{owner}['palette']", palette, Sequence[tuple[_Shade, _Shade, _Shade]])
    if len(palette) < number:
        raise InvalidInputError(
            f"{owner}['palette'] must have a colour for each of {number} classes, got {len(palette)}"
        )
    return {**metainfo, "classes": classes, "palette": [tuple(colour) for colour in palette]}
