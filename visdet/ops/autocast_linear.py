"""A float32 linear layer under autocast, whose gradients are not rounded to autocast's type."""

from typing import Any

import torch
from torch import Tensor

from ._library import declares, differentiable_once
from .tracing import is_traced

__all__ = ["autocast_linear", "is_built", "suits_autocast_linear"]

_HALVES = (torch.float16, torch.bfloat16)


def suits_autocast_linear(input: Tensor, weight: Any, bias: Any, least_rows: int = 1) -> bool:
    """Return whether ``autocast_linear`` computes a layer: one that is trained in float32 under autocast on CUDA.

    Args:
        input: [..., C]. weight, bias: [D, C] and [D], or None or anything else that the layer has instead.
        least_rows: how many rows ``input`` must have.
    """
    if type(input) is not Tensor or not input.is_cuda or input.dim() < 2 or is_traced():
        return False
    if not 0 < least_rows * input.shape[-1] <= input.numel():
        return False
    if not torch.is_grad_enabled() or not torch.is_autocast_enabled("cuda"):
        return False
    dtype = torch.get_autocast_dtype("cuda")
    if dtype not in _HALVES or input.dtype not in (torch.float32, dtype) or not is_built():
        return False
    if not all(_is_trained_in_float32(parameter, input.device) for parameter in (weight, bias)):
        return False
    return weight.dim() == 2 and weight.shape[1] == input.shape[-1] and bias.shape == weight.shape[:1]


def _is_trained_in_float32(parameter: Any, device: torch.device) -> bool:
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
        RuntimeError: The shapes do not fit.
    """
    return _AutocastLinear.apply(input, weight, bias, dtype)


def is_built() -> bool:
    """Return whether the library has the operator.

    Raises:
        NotBuiltError: the library was built from an older source.
    """
    return declares("autocast_linear")


class _AutocastLinear(torch.autograd.Function):
    """One call of C++ forward and one backward (csrc/autocast_linear.cpp)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        output, *saved = torch.ops.visdet.autocast_linear.default(input, weight, bias, dtype)
        ctx.save_for_backward(*saved)
        ctx.input_dtype = input.dtype
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.visdet.autocast_linear_backward.default(
            grad_output, *ctx.saved_tensors, ctx.needs_input_grad[0], ctx.input_dtype
        )
        of_weight, of_bias, *of_input = grads
        return of_input[0] if of_input else None, of_weight, of_bias, None
