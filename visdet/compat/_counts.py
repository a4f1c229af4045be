"""How often a program has called what visdet provides, which ``python -m visdet.compat run`` tells at its end."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CALLS", "counted", "summary"]

CALLS: Counter[str] = Counter()


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that counts its calls under a name. What a compiler records is not counted."""

    @functools.wraps(function)
    def count(*arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            CALLS[name] += 1
        return function(*arguments, **named)

    return count


def summary() -> str:
    """Return a line on the calls of this process."""
    if not CALLS:
        return "visdet: the program called no operator of visdet (calls in compiled functions do not count)"
    return "visdet: the program called " + ", ".join(f"{name} ({n})" for name, n in CALLS.most_common())
