"""Gradients of an operator written into given tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["add_gradients"]


def add_gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], grad_output: Tensor, outputs: list[Tensor | None]
) -> None:
    """Write the gradient of ``function(*inputs)`` for each input that has an output tensor."""
    with torch.enable_grad():
        leaves = [
            tensor.detach().requires_grad_(out is not None)
            for tensor, out in zip(inputs, outputs, strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads = iter(torch.autograd.grad(function(*leaves), wanted, grad_output, allow_unused=True))
    for out in outputs:
        if out is not None and (grad := next(grads)) is not None:
            out.copy_(grad)
