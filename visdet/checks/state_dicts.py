"""Questions about the weights of a model or a checkpoint."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def common_prefix(keys: Collection[str], expected: Collection[str]) -> str:
    """Return the prefix whose removal makes the most keys expected ones, or "" if as many are expected without it."""
    found = Counter({"": sum(key in expected for key in keys)})
    for key in keys:
        places = (place + 1 for place, letter in enumerate(key) if letter == ".")
        found.update(key[:place] for place in places if key[place:] in expected)
    return found.most_common(1)[0][0]


def parameters_of(model: nn.Module) -> tuple[int, int]:
    """Return how many numbers the parameters of a model have, and how many of them are trained."""
    total = trained = 0
    for parameter in model.parameters():
        count = parameter.numel()
        total += count
        trained += count if parameter.requires_grad else 0
    return total, trained


def is_dense(value: Any) -> bool:
    """Return whether ``value`` is a tensor with a number in memory for each element."""
    return (
        isinstance(value, Tensor)
        and not (value.is_nested or value.is_quantized or value.is_meta)
        and value.layout == torch.strided
    )


def kind_of_numbers(value: Tensor) -> str:
    """Return 'float' for floats of 16 to 64 bits, 'integer', or the dtype: bool, complex numbers and floats of 8 bits.

    A conversion to another kind loses information, or takes numbers that are scaled for what they are not.
    """
    dtype = value.dtype
    if dtype.is_floating_point and dtype.itemsize > 1:
        return "float"
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return "integer" if is_integer else str(dtype)


def differing(
    weights: Mapping[str, Any], expected: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return descriptions of the weights of another shape, and of those whose numbers torch would cast with a loss."""
    shapes: dict[str, str] = {}
    types: dict[str, str] = {}
    for key, value in weights.items():
        own = expected.get(key)
        if not isinstance(own, Tensor):
            continue
        shape = list(own.shape)
        found = list(value.shape) if is_dense(value) else type(value).__name__
        if found != shape:
            shapes[key] = f"{key} {found} for {shape}"
        elif kind_of_numbers(value) != kind_of_numbers(own) and not key.endswith("num_batches_tracked"):
            types[key] = f"{key} {value.dtype} for {own.dtype}"
    return shapes, types


def nonfinite_names(weights: Mapping[Any, Any]) -> list[str]:
    """Return the names of the dense tensors that hold NaN or an infinite number."""
    return [
        str(name) for name, value in weights.items() if is_dense(value) and not _is_finite(value.detach())
    ]


def _is_finite(value: Tensor) -> bool:
    if not (value.is_floating_point() or value.is_complex()):
        return True
    stored = value.untyped_storage().nbytes() // value.element_size()
    if stored < value.numel():  # Elements share memory. A result for each of them could need too much of it.
        value = value.as_strided((stored,), (1,), 0)
    return bool(torch.isfinite(value.float() if value.element_size() == 1 else value).all())
