"""Gradients of parameters that someone else computes beside a backward pass, and not the pass itself."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

__all__ = ["parameter_gradients", "parameter_gradients_go_to"]

Gradients = Sequence[Tensor]
Taker = Callable[[Sequence[Tensor], Callable[[], Gradients]], bool]

_taker: ContextVar[Taker | None] = ContextVar("visdet_parameter_gradients", default=None)


@contextmanager
def parameter_gradients_go_to(take: Taker) -> Iterator[None]:
    """Run the block, in which ``take`` is offered the gradients of parameters.

    Args:
        take: Is given parameters, and a function that computes their gradients. It returns whether it takes them. If it
            does, the backward pass gives these parameters none.
    """
    token = _taker.set(take)
    try:
        yield
    finally:
        _taker.reset(token)


def parameter_gradients(
    parameters: Sequence[Tensor], compute: Callable[[], Gradients]
) -> Sequence[Tensor | None]:
    """Return the gradients that ``compute`` gives, or None for each if someone else takes them."""
    take = _taker.get()
    if take is not None and take(parameters, compute):
        return [None] * len(parameters)
    return compute()
