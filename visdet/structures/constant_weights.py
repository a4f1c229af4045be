"""What follows from weights alone, kept while the weights do not change."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

__all__ = ["computed_once", "weights_are_constant", "weights_may_change"]

T = TypeVar("T")

_kept: list[dict[Hashable, Any] | None] = [None]


@contextmanager
def weights_are_constant() -> Iterator[None]:
    """Let ``computed_once`` keep results within the block, in which no weight changes after it was used."""
    _kept.append({})
    try:
        yield
    finally:
        _kept.pop()


@contextmanager
def weights_may_change() -> Iterator[None]:
    """Let ``computed_once`` compute in each call within the block, as for the capture of a graph."""
    _kept.append(None)
    try:
        yield
    finally:
        _kept.pop()


def computed_once(owner: Hashable, compute: Callable[[], T]) -> T:
    """Return the result of a function of the weights of a module, which may be that of an earlier call.

    Results are kept only within ``weights_are_constant`` and without gradients, for one type of autocast at a time.

    Args:
        owner: the module whose weights are read, or a tuple with it. It must stay alive within the block.
        compute: the function.
    """
    kept = _kept[-1]
    if kept is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return compute()
    key = (
        owner,
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")),
    )
    if key not in kept:
        kept[key] = compute()
    return kept[key]
