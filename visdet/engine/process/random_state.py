"""The state of every random number generator that training draws from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_spare = np.random.MT19937(0)
_preserved: list[dict[str, Any]] = []


def get_random_state() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy, torch and the current GPU."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (transforms may use it)
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators to ``state``, a result of :func:`get_random_state`, also one that a checkpoint has held.

    The state of a GPU's generator is ignored on a machine without one.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def current_random_state() -> dict[str, Any]:
    """Return the random state with which training goes on.

    Inside a block of :func:`preserved_random_state`, that is the state from before the block.
    """
    return _preserved[-1] if _preserved else get_random_state()


@contextmanager
def preserved_cpu_state() -> Iterator[None]:
    """Restore the random state of the CPU at the end of the block, which has to seed the generators.

    numpy takes 0.2 ms to copy its state and to set it again, so that the block draws from another generator.
    """
    # numpy's stubs do not have these functions.
    set_generator = np.random.set_bit_generator  # type: ignore[attr-defined]
    numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
    set_generator(_spare)
    python = random.getstate()
    of_torch = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        set_generator(numpy)
        torch.set_rng_state(of_torch)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the random state at the end of the block.

    Validation runs in such a block, so that the number of validations has no influence on training.
    """
    _preserved.append(get_random_state())
    try:
        yield
    finally:
        set_random_state(_preserved.pop())
