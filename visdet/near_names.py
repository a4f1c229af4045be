"""Names that were meant instead of one that is not known."""

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "unknown_attribute"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'A' or 'B'?" with the nearest of the known names, or an empty text if none is near."""
    by_lower_case = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, 2, 0.75)
    return f"; did you mean {' or '.join(repr(by_lower_case[one]) for one in near)}?" if near else ""


def unknown_attribute(package: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error that a package has no attribute of a name, with the nearest of its public names."""
    return AttributeError(f"module {package!r} has no attribute {name!r}{did_you_mean(name, known)}")
