"""Functions that write the results and the gradients of an operator into the tensors of mmcv's wrappers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["add_gradients", "choice", "gradients_of", "write"]


def _full(entry: str) -> str:
    return entry if "." in entry else f"mmcv._ext.{entry}"


def choice(entry: str, name: str, number: int, names: Sequence[str]) -> str:
    """Return the name of a choice that mmcv gives by its number.

    Args:
        entry: the name of the function, for the error message. Without a dot, it is one of ``mmcv._ext``.
        name: the name of its argument, for the error message.
        number: the value of the argument.
        names: the names of the choices in the order of their numbers.

    Raises:
        ValueError: there is no choice of this number.
    """
    if not 0 <= number < len(names):
        meanings = ", ".join(f"{i} ({meaning})" for i, meaning in enumerate(names))
        raise ValueError(f"{_full(entry)}: {name} must be one of {meanings}, got {number!r}")
    return names[number]


def write(entry: str, name: str, target: Tensor, values: Tensor) -> None:
    """Copy values into the tensor that the caller has allocated for them.

    Raises:
        ValueError: the tensor has another shape.
    """
    if target.shape != values.shape:
        raise ValueError(f"{_full(entry)}: {name} must be {list(values.shape)}, got {list(target.shape)}")
    target.copy_(values)


def add_gradients(
    entry: str,
    function: Callable[..., Tensor],
    inputs: list[Tensor],
    grad_output: Tensor,
    outputs: Sequence[Tensor | None],
) -> None:
    """Write the gradient of ``function(*inputs)`` for each input that has an output tensor.

    Raises:
        ValueError: ``grad_output`` does not have the shape of the function's result, or an output does not have the
            shape of its input.
    """
    for input, out in zip(inputs, outputs, strict=True):
        if out is not None and out.shape != input.shape:
            raise ValueError(
                f"{_full(entry)}: a gradient must be written to a tensor of its input's shape {list(input.shape)}, "
                f"got {list(out.shape)}"
            )
    with torch.enable_grad():
        leaves = [
            tensor.detach().requires_grad_(out is not None)
            for tensor, out in zip(inputs, outputs, strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        result = function(*leaves)
        if grad_output.shape != result.shape:
            raise ValueError(
                f"{_full(entry)}: grad_output must be {list(result.shape)}, got {list(grad_output.shape)}"
            )
        grads = iter(torch.autograd.grad(result, wanted, grad_output, allow_unused=True))
    for out in outputs:
        if out is not None and (grad := next(grads)) is not None:
            out.copy_(grad)


def gradients_of(
    entry: str, function: Callable[..., Tensor], inputs: list[Tensor], grad_output: Tensor
) -> list[Tensor]:
    """Return the gradient of ``function(*inputs)`` for each input, as ``add_gradients`` writes it."""
    grads = [torch.zeros_like(tensor) for tensor in inputs]
    add_gradients(entry, function, inputs, grad_output, grads)
    return grads
