"""A float32 linear layer under autocast, whose gradients are not rounded to autocast's type."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._declared import declared
from .._registration import differentiable_once
from ..tracing import is_traced
from .parameter_gradients import parameter_gradients

__all__ = ["autocast_linear", "column_sums", "suits_autocast_linear"]

_HALVES = (torch.float16, torch.bfloat16)
_MIN_ROWS = 8192  # From here on, the gradients of ``autocast_linear`` take the GPU less time than torch's.


def suits_autocast_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether ``autocast_linear`` saves time: for many rows, trained in float32 under autocast on CUDA.

    Args:
        input: [..., C]. weight: [D, C]. bias: [D] or None.
    """
    if type(input) is not Tensor or not input.is_cuda or input.dim() < 2 or is_traced() or bias is None:
        return False
    dtype = torch.get_autocast_dtype("cuda")
    return (
        0 < _MIN_ROWS * input.shape[-1] <= input.numel()
        and torch.is_grad_enabled()
        and torch.is_autocast_enabled("cuda")
        and dtype in _HALVES
        and input.dtype in (torch.float32, dtype)
        and all(_is_trained_in_float32(parameter, input.device) for parameter in (weight, bias))
        and weight.shape[1:] == input.shape[-1:]
        and bias.shape == weight.shape[:1]
    )


def _is_trained_in_float32(parameter: Tensor, device: torch.device) -> bool:
    return (
        type(parameter) in (Tensor, torch.nn.Parameter)
        and parameter.layout == torch.strided
        and parameter.requires_grad
        and parameter.dtype == torch.float32
        and parameter.device == device
    )


@declared(input="floating [..., C]", weight="floating [D, C]", bias="None or floating [D]")
def autocast_linear(
    input: Tensor,  # [..., C]
    weight: Tensor,  # [D, C]
    bias: Tensor | None,  # [D]
    dtype: torch.dtype,
    relu_dropout: float | None = None,
) -> Tensor:  # [..., D]
    """Return ``torch.nn.functional.linear`` in this type, with float32 gradients of weight and bias.

    Autocast rounds the gradients of weight and bias to 16 bits and then converts them, by a kernel each. Here, the
    products are written in float32. Differentiable once.

    Args:
        input: The rows, in float32 or in ``dtype``.
        weight, bias: The parameters of the layer, in float32 or in ``dtype``. The bias may be None.
        dtype: The type of the output.
        relu_dropout: The rate, less than 1, of a dropout after a ReLU, both of which the output goes through, or None
            if it goes through neither. The product's kernel computes the ReLU. The output says which numbers were
            kept, so that no mask is held, and one kernel computes the gradient of both.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.
    """
    return _AutocastLinear.apply(input, weight, bias, dtype, relu_dropout)


class _AutocastLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        relu_dropout: float | None,
    ) -> Tensor:
        ctx.parameters = weight, bias
        ctx.input_dtype = input.dtype
        rows = input.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        output = _linear(rows, weight, bias, relu_dropout is not None)
        if relu_dropout:
            output = torch.native_dropout(output, relu_dropout, train=True)[0]
        # A view could not be changed in place.
        output = torch.ops.aten._unsafe_view(output, (*rows.shape[:-1], len(weight)))
        ctx.save_for_backward(rows, weight, None if relu_dropout is None else output)
        ctx.factor = 1 / (1 - (relu_dropout or 0.0))  # of what is kept by the dropout
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, activated = ctx.saved_tensors
        if activated is not None:
            grad_output = torch.ops.aten.threshold_backward(grad_output, activated, 0)
        grad = _as_matrix(grad_output)
        matrix = _as_matrix(rows)
        device_type = grad.device.type
        factor = ctx.factor
        parameters = [parameter for parameter in ctx.parameters if parameter is not None]

        def of_parameters() -> list[Tensor]:
            with torch.autocast(device_type, enabled=False):
                of_weight = _product(grad.T, matrix, torch.float32)
                of_both = [of_weight, column_sums(grad)][: len(parameters)]
                return of_both if factor == 1 else [part * factor for part in of_both]

        # Many rows would be held until the backward pass ends.
        is_small = len(matrix) < _MIN_ROWS
        found = parameter_gradients(parameters, of_parameters) if is_small else of_parameters()
        of_input = None
        if ctx.needs_input_grad[0]:
            with torch.autocast(device_type, enabled=False):
                of_input = _product(grad, weight, ctx.input_dtype, factor).view(rows.shape)
        return of_input, found[0], found[1] if len(found) > 1 else None, None, None


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return the linear layer [..., D], or with a ReLU its output of all rows [N, D]."""
    is_cuda = rows.is_cuda
    if relu and is_cuda and bias is not None:
        return torch._addmm_activation(bias, _as_matrix(rows), weight.T)
    if is_cuda or rows.dtype == torch.float32:
        output = F.linear(rows, weight, bias)
    else:  # Products of bfloat16 on CPUs with AMX read beyond a row in torch 2.14.
        exact = F.linear(rows.float(), weight.float(), None if bias is None else bias.float())
        output = exact.to(rows.dtype)
    return output.relu_() if relu else output


def _as_matrix(rows: Tensor) -> Tensor:
    return torch.atleast_2d(rows).flatten(0, -2)


def column_sums(matrix: Tensor) -> Tensor:
    """Return the sums of the columns in float32.

    torch's sum takes up to four times as long as this product, and begins with a memset, for which the branches of a
    CUDA graph wait.
    """
    if matrix.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return matrix.sum(0)  # The product would be rounded.
    return _product(_ones(matrix), matrix, torch.float32)[0]


_kept_ones: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}


def _ones(matrix: Tensor) -> Tensor:
    """Return ones [1, N] of the type of a matrix [N, C], on a GPU from a tensor that is made once.

    Graphs read it where it was when they were captured. So it is neither made in a capture nor ever given back.
    """
    length = len(matrix)
    new_ones = matrix.new_ones
    if type(matrix) is not Tensor or not matrix.is_cuda:
        return new_ones(1, length)
    device = matrix.device
    most = 1 << length.bit_length()
    key = device, matrix.dtype, most
    if key not in _kept_ones:
        if torch.cuda.is_current_stream_capturing():
            return new_ones(1, length)
        _kept_ones[key] = new_ones(1, most)
        torch.cuda.current_stream(device).synchronize()  # Other streams may read it next.
    return _kept_ones[key][:, :length]


def _product(one: Tensor, other: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """Return the product of two matrices and a factor in this type. On CUDA, a kernel writes it in this type.

    On the CPU it is a product of float32, for the reason in ``_linear``.
    """
    options: dict[str, Any] = {}
    if not one.is_cuda:
        one = one.float()
        other = other.float()
    elif one.dtype != dtype:
        options["out_dtype"] = dtype
    if factor == 1:
        return torch.mm(one, other, **options).to(dtype)
    unread = one.new_empty(other.shape[1:], dtype=options.get("out_dtype"))
    return torch.addmm(unread, one, other, **options, beta=0, alpha=factor).to(dtype)
