"""The hook of a kind among those of a run."""

from collections.abc import Iterable
from typing import Any, TypeVar

H = TypeVar("H")


def first_hook(hooks: Iterable[Any], kind: type[H]) -> H | None:
    """Return the first hook of a class or its subclasses, or None if there is none."""
    return next((hook for hook in hooks if isinstance(hook, kind)), None)
