"""The mistakes that an operator must refuse, by what ``@declared`` says of its arguments."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visdet.ops._declared import DECLARATIONS

from .problem import Operator

__all__ = ["mistakes"]

# Numbers and choices that none may be, and what a tensor may become.
NUMBERS = (None, "x", {}, [], [1, 1, 1, 1, 1], 1j, float("nan"), 1 << 70, torch.ones((), device="meta"))
TENSORS: dict[Any, Callable[[Tensor], Any]] = {
    "None": lambda value: None,
    "list": Tensor.tolist,
    "array": lambda value: value.to(torch.float64).numpy(),
    "sparse": Tensor.to_sparse,
    "meta": lambda value: value.to("meta"),
    "device": Tensor.cpu,
    "rank": lambda value: value[None],
    "complex": lambda value: value.to(torch.complex64),
    "8 bits": lambda value: value.to(torch.float8_e4m3fn),
    "bool": Tensor.bool,
    "integers": Tensor.int,
    "floats": Tensor.float,
}
WRONG_TYPES = {
    "floating": ("complex", "8 bits", "bool", "integers"),
    "real": ("complex", "8 bits", "bool"),
    "integers": ("complex", "8 bits", "bool", "floats"),
    "mask": ("complex", "8 bits"),
    "any": (),
}
BEYOND = {"at least": -1, "above": 0, "at most": 1}
# Tensors that operators check by functions of their own.
CHECKED_WITHIN = {
    "labels": "None or list or array or mask",
    "level_shapes": "list or array or integers",
    "level_starts": "None or list or array or integers",
}


def mistakes(operator: Operator, given: dict[str, Any]) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """Yield an argument of a sound call, what may be wrong with it, and the function that makes it so.

    What is wrong is a key of ``TENSORS``, the number of a dimension that becomes longer by one, the bound that a number
    passes, such as "at least 1", or what is given instead of a number. To what follows from the declaration,
    ``Operator.spoiled`` adds mistakes of tensors.
    """
    declared = DECLARATIONS.get(operator.name, {}) | CHECKED_WITHIN
    texts = {name: text for name, text in declared.items() if given.get(name) is not None}
    letters = Counter(letter for text in texts.values() for letter in re.findall(r"\b[A-Z]\b|\.\.\.", text))
    tensors = [name for name in texts if isinstance(given[name], Tensor) and name not in CHECKED_WITHIN]
    for name, value in given.items():
        text = texts.get(name, "")
        kind = re.match(rf"([\w ]+ or )?({'|'.join(WRONG_TYPES)})\b", text)
        if not isinstance(value, Tensor) or (text and not kind):
            for what, change in _of_number(text) if text else ():
                yield name, what, change
            continue
        whats: list[Any] = list(operator.spoiled.get(name, ()))
        if kind:
            whats += [*WRONG_TYPES[kind[2]], "sparse", *_wrong_sizes(text, letters)]
            whats += [what for what in ("None", "list", "array") if f"{what} or " not in text]
            whats += ["meta"] if name not in tensors[:1] else []
            whats += ["device"] if name in tensors and len(tensors) > 1 else []
        for what in whats if value.numel() else ():
            if what != "device" or value.is_cuda:
                yield name, what, partial(_longer, dim=what) if isinstance(what, int) else TENSORS[what]


def _of_number(text: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield what may be wrong with a number or a choice that is so declared."""
    for wrong in NUMBERS[1:] if text.startswith("None or ") else NUMBERS:
        yield repr(wrong), partial(_other, wrong=wrong)
    for comparison, bound in re.findall(r"(at least|above|at most) ([^\s,]+)", text):
        wrong = (int if "integer" in text else float)(bound) + BEYOND[comparison]
        yield f"{comparison} {bound}", partial(_with_last, wrong=wrong)


def _wrong_sizes(text: str, letters: Counter[str]) -> Iterator[str | int]:
    """Yield "rank" and the dimensions whose size is known by the declaration or by another argument."""
    layout = re.search(r"\[(.+?)\]", text)
    sizes = layout[1].split(", ") if layout else []
    if sizes and (sizes[0] != "..." or letters["..."] > 1):
        yield "rank"
    for dim, size in enumerate(sizes):
        if size != "..." and (size.isdigit() or "*" in size or letters[size] > 1):
            yield dim - len(sizes) if sizes[0] == "..." else dim


def _longer(value: Tensor, dim: int) -> Tensor:
    return torch.cat([value, value.narrow(dim, 0, 1)], dim)


def _other(value: Any, wrong: Any) -> Any:
    return wrong


def _with_last(value: Any, wrong: Any) -> Any:
    """Return the number instead of the given one, or of the last of several."""
    return [*value[:-1], wrong] if hasattr(value, "__len__") and len(value) > 1 else wrong
