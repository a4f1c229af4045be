"""The data sets and the transforms inside of others."""

from collections.abc import Iterator
from typing import Any

_INNER = ("dataset", "datasets", "pipeline", "transforms", "_read")


def parts_of(part: Any) -> Iterator[Any]:
    """Yield a data set, a pipeline, a transform or a list of them, and whatever is inside of it."""
    if isinstance(part, (list, tuple)):
        for item in part:
            yield from parts_of(item)
        return
    yield part
    for name in _INNER:
        inner = getattr(part, name, None)
        if inner is not None:
            yield from parts_of(inner)
