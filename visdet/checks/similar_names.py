"""Names that look alike but are not equal, such as ``Car`` and ``car``."""

import unicodedata
from collections.abc import Iterable


def look_alike(name: str, others: Iterable[str]) -> str | None:
    """Return a phrase that says which of ``others`` looks like ``name`` and how it differs, or None.

    Names look alike if they are equal without regard to case, to the form of Unicode, to spaces at the ends, and to the
    choice between space, ``_`` and ``-``. (An ``é`` is one character in the form NFC, and two in NFD.) An equal name
    does not count.
    """
    for other in others:
        if other == name or _folded(other) != _folded(name):
            continue
        if unicodedata.normalize("NFC", other) == unicodedata.normalize("NFC", name):
            return (
                f"{other!r} differs from {name!r} only in its Unicode form (NFC or NFD): {other!a}, {name!a}"
            )
        kind = "case" if other.lower() == name.lower() else "case, spaces, hyphens or Unicode form"
        return f"{other!r} differs from {name!r} only in {kind}"
    return None


def _folded(name: str) -> str:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join(folded.replace("_", " ").replace("-", " ").split())
