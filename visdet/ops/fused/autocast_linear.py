"""A float32 linear layer under autocast, whose gradients are not rounded to autocast's type."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._library import declares, differentiable_once
from ..tracing import is_traced

__all__ = ["autocast_linear", "suits_autocast_linear"]

_HALVES = (torch.float16, torch.bfloat16)


def suits_autocast_linear(input: Tensor, weight: Tensor, bias: Tensor | None, least_rows: int = 1) -> bool:
    """Return whether ``autocast_linear`` computes a layer: one that is trained in float32 under autocast on CUDA.

    Args:
        input: [..., C]. weight: [D, C]. bias: [D] or None.
        least_rows: how many rows ``input`` must have.
    """
    if type(input) is not Tensor or not input.is_cuda or input.dim() < 2 or is_traced() or bias is None:
        return False
    if not 0 < least_rows * input.shape[-1] <= input.numel():
        return False
    if not torch.is_grad_enabled() or not torch.is_autocast_enabled("cuda"):
        return False
    dtype = torch.get_autocast_dtype("cuda")
    if dtype not in _HALVES or input.dtype not in (torch.float32, dtype) or not declares("autocast_linear"):
        return False
    if not all(_is_trained_in_float32(parameter, input.device) for parameter in (weight, bias)):
        return False
    return weight.dim() == 2 and weight.shape[1] == input.shape[-1] and bias.shape == weight.shape[:1]


def _is_trained_in_float32(parameter: Tensor, device: torch.device) -> bool:
    return (
        type(parameter) in (Tensor, torch.nn.Parameter)
        and parameter.layout == torch.strided
        and parameter.requires_grad
        and parameter.dtype == torch.float32
        and parameter.device == device
    )


def autocast_linear(
    input: Tensor,  # [..., C]
    weight: Tensor,  # [D, C]
    bias: Tensor,  # [D]
    dtype: torch.dtype,
) -> Tensor:  # [..., D]
    """Return ``torch.nn.functional.linear`` in this type, of float32 weight and bias.

    Autocast rounds the gradients of weight and bias to 16 bits and then converts them, by a kernel each, and torch sums
    the bias's by a kernel that takes longer than the products of a decoder. Here, the products are written in float32,
    and visdet's kernel sums the columns. Weight and bias are converted in every call, by one launch, since what
    autocast keeps for later calls has to be recorded in their graph. Differentiable once.

    Args:
        input: The rows, in float32 or in ``dtype``.
        weight, bias: The parameters of the layer, in float32.
        dtype: The type of the output.

    Raises:
        OutOfMemoryError: The GPU has not enough memory, in the forward or in the backward (before torch 2.13, whose
            errors do not say why a call from C++ failed, this is a RuntimeError).
        RuntimeError: The shapes do not fit.
    """
    return _AutocastLinear.apply(input, weight, bias, dtype)


def _run(operator: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
    """Return the results of a C++ operator. If the GPU lacks memory, the error has torch's type for that again.

    The stable interface of C++ turns every error of a nested call into a RuntimeError with the same message.
    """
    try:
        return operator(*arguments)
    except RuntimeError as error:
        if "out of memory" in str(error) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


class _AutocastLinear(torch.autograd.Function):
    """One call of C++ forward and one backward (csrc/autocast_linear.cpp)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        operator = torch.ops.visdet.autocast_linear.default
        output, *saved = _run(operator, input, weight, bias, dtype)
        ctx.save_for_backward(*saved)
        ctx.input_dtype = input.dtype
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        operator = torch.ops.visdet.autocast_linear_backward.default
        grads = _run(operator, grad_output, *ctx.saved_tensors, ctx.needs_input_grad[0], ctx.input_dtype)
        of_weight, of_bias, *of_input = grads
        return of_input[0] if of_input else None, of_weight, of_bias, None
