"""Names that look alike but are not equal, such as ``Car`` and ``car``."""

import re
import unicodedata
from collections.abc import Iterable

_UNSEEN = "[\u00ad\u200b-\u200f\u2060\ufeff]"  # characters that no font draws, which copied text may have


def look_alike(name: str, others: Iterable[str]) -> str | None:
    """Return a phrase that says which of ``others`` looks like ``name``, or None.

    Names look alike if they are equal without regard to case, to the form of Unicode, to characters that are not drawn,
    to spaces at the ends, and to the choice between space, ``_`` and ``-``. (An ``é`` is one character in the form NFC,
    and two in NFD.) An equal name does not count.
    """
    other = next((one for one in others if one != name and _folded(one) == _folded(name)), None)
    if other is None:
        return None
    kind = "case" if other.lower() == name.lower() else "case, spaces, hyphens or Unicode form"
    code = "" if f"{other}{name}".isascii() else f": {other!a}, {name!a}"
    return f"{other!r} differs from {name!r} only in {kind}{code}"


def _folded(name: str) -> str:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return re.sub(r"[\s_-]+", " ", re.sub(_UNSEEN, "", folded)).strip()
