"""Fonts for names in any script."""

import functools
import logging
from pathlib import Path

from mmengine.logging import print_log


@functools.lru_cache(maxsize=4096)
def legible(*texts: str) -> tuple[list[str], str]:
    """Return texts as they can be drawn, and the file of a font that has all their characters.

    The font is matplotlib's DejaVu Sans Bold, or else one of the system. If none has a character, the character becomes
    its code point, such as ``U+87BA``, so that different texts look different. So does a line break or another
    character without a picture. The first time, a warning says which fonts to install.
    """
    needed, file = _codes_of("".join(texts)), _own_font()
    if not needed <= _characters(file):
        file = next((font for font in _system_fonts() if needed <= _characters(font)), file)
    drawn = _characters(file)
    if lacking := [text for text in texts if not _codes_of(text) <= drawn]:
        _warn_once(lacking[0])
    return [_with_code_points(text, drawn) for text in texts], file


def _codes_of(text: str) -> set[int]:
    """Return the code points of the characters that have a picture."""
    return {ord(character) for character in text if character.isprintable()}


def _with_code_points(text: str, drawn: frozenset[int]) -> str:
    if text.isprintable() and drawn.issuperset(map(ord, text)):
        return text
    shown = (c if c.isprintable() and ord(c) in drawn else f" U+{ord(c):04X} " for c in text)
    return " ".join("".join(shown).split())


@functools.cache
def _own_font() -> str:
    import matplotlib  # slow to import, and not needed before the first picture

    return str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans-Bold.ttf")


@functools.cache
def _system_fonts() -> list[str]:
    """Return the fonts of the system in outlines. Those of bitmaps have one size, and draw in colour alone."""
    from matplotlib.font_manager import findSystemFonts
    from matplotlib.ft2font import FT2Font

    found = []
    for file in sorted(findSystemFonts()):
        try:
            if FT2Font(file).scalable and "lastresort" not in Path(file).name.lower():
                found.append(file)
        except (RuntimeError, OSError):  # a damaged file
            continue
    return found


@functools.cache
def _characters(file: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(file).get_charmap())


def _warn_once(text: str) -> None:
    if not _warned:
        _warned.append(text)
        print_log(
            f"no installed font has all characters of {text!r}, so that pictures show code points (U+...) instead. "
            "Install one that does, on Debian and Ubuntu for example fonts-noto-cjk, fonts-noto-core or fonts-symbola",
            logger="current",
            level=logging.WARNING,
        )


_warned: list[str] = []  # the text that the warning was about
