"""Layer normalisation of a residual sum, together with the dropout before it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._arguments import check_that
from .._declared import declared
from .._library import CONSTANTS
from .._registration import differentiable_once
from ._gpu_rows import has_kernel, packed
from .autocast_copy import can_be_added, give_copies
from .autocast_linear import column_sums
from .parameter_gradients import parameter_gradients

__all__ = ["dropout_add_layer_norm"]

_PACK = CONSTANTS.get("norm_pack", 1)  # values that a thread holds side by side
_MAX_CHANNELS = CONSTANTS.get("max_norm_channels", 0)
_MIN_ROWS_TO_COPY = 8192  # of ``autocast_linear``, which reads the copies


@declared(
    keeps_autocast=True,
    input="floating [..., C]",
    residual="None or floating [..., C]",
    weight="floating [C]",
    bias="floating [C]",
    p="number, at least 0, at most 1",
    eps="number, at least 0",
)
def dropout_add_layer_norm(
    input: Tensor,  # [..., C]
    residual: Tensor | None,  # [..., C]
    weight: Tensor,  # [C]
    bias: Tensor,  # [C]
    p: float = 0.0,
    eps: float = 1e-5,
    relu: bool = False,
    next_pos: Tensor | None = None,  # [B or 1, ..., C]
) -> Tensor:  # [..., C]
    """Return the layer normalisation of ``residual + dropout(input, p)`` over the last dimension.

    On a GPU, one kernel computes it, and one its gradients but for a sum over blocks. The mask of dropout is not kept:
    it follows from one random number, which torch's default generator draws on the device. So ``torch.manual_seed``
    governs it, and each replay of a CUDA graph draws anew. Gradients of weight and bias are summed in an order that is
    always the same. The kernels compute in float32. Under autocast, the kernel also writes a copy of many rows in
    autocast's type, and the sum of ``next_pos`` and them (see ``autocast_copy``), whose gradients it adds to that of
    the output.

    Args:
        input: The output of a branch, in any float type.
        residual: The tensor that the branch is added to, or None.
        weight, bias: The scale and the shift of the normalisation.
        p: The probability with which an element of ``input`` becomes zero. The others are divided by ``1 - p``.
        eps: The number that is added to the variance.
        relu: Whether ``input`` is replaced by ``relu(input)``.
        next_pos: What the next layer will add to the output, or None. The output is the same with it.

    Returns:
        A tensor of the shape of ``input``, in the type that ``torch.nn.functional.layer_norm`` gives, which is float32
        under autocast.

    Raises:
        ValueError: A number, shape or type does not fit. The message names the argument.

    The kernels serve float32 weights and C that is a multiple of 8 and at most 512, on CUDA. Elsewhere, and under
    ``torch.compile`` and exports, torch's operators compute the same. It is differentiable once on a GPU.
    """
    channels = input.shape[-1]
    if not _serves_norm(input, residual, weight, bias):
        check_that(channels > 0, "dropout_add_layer_norm", "input", "have at least 1 channel", input)
        activated = F.relu(input) if relu else input
        dropped = F.dropout(activated, p) if p > 0 else activated
        return F.layer_norm(
            dropped if residual is None else residual + dropped, weight.shape, weight, bias, eps
        )
    if not torch.is_grad_enabled():  # a node of the autograd graph takes longer on the host than the operator
        return _normalise(input, residual, weight, bias, p, relu, eps, False, None)[0]
    copies = (
        torch.is_autocast_enabled("cuda")
        and input.dtype == torch.get_autocast_dtype("cuda") != torch.float32
        and input.numel() >= _MIN_ROWS_TO_COPY * channels
    )
    added = next_pos if copies and can_be_added(input, next_pos) else None
    output, copy, total = _DropoutAddLayerNorm.apply(
        input, residual, weight, bias, p, relu, eps, copies, None if added is None else added.detach()
    )
    if copies:
        give_copies(output, copy, added, total)
    return output


def _serves_norm(input: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor) -> bool:
    """Return whether the kernels compute what torch's operators would."""
    dtype = input.dtype
    C = len(weight)
    return (
        has_kernel("dropout_add_layer_norm", input)
        and weight.dtype == bias.dtype == torch.float32
        and C % _PACK == 0
        and C <= _MAX_CHANNELS
        and (residual is None or residual.dtype in (torch.float32, dtype))
        # torch would refuse float32 weights for 16-bit input.
        and (dtype == torch.float32 or torch.is_autocast_enabled("cuda"))
    )


def _normalise(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    p: float,
    relu: bool,
    eps: float,
    copies: bool,
    added: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Return the output, its copy and its sum in the type of the input if asked for, and what the backward needs."""
    input = packed(input)
    weight = packed(weight)
    bias = packed(bias)
    residual = None if residual is None else packed(residual)
    seed = torch.empty((), dtype=torch.int64, device=input.device).random_() if p > 0 else None
    output, copy, total, statistics = torch.ops.visdet.dropout_add_layer_norm.default(
        input, residual, weight, bias, seed, p, relu, eps, copies, None if added is None else packed(added)
    )
    return output, copy, total, (input, residual, weight, statistics, seed)


class _DropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        p: float,
        relu: bool,
        eps: float,
        copies: bool,
        added: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        output, copy, total, saved = _normalise(input, residual, weight, bias, p, relu, eps, copies, added)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.parameters = weight, bias
        ctx.options = p, relu
        return output, copy if copies else None, None if added is None else total

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # Activation checkpointing lets a node read them only once.
        given = [None if grad is None else packed(grad) for grad in grads]
        if given[0] is None:
            others = [grad.float() for grad in given if grad is not None]
            if not others:
                return (None,) * 9
            given = [others[0] if len(others) == 1 else others[0] + others[1], None, None]
        grad_input, grad_residual, block_sums = torch.ops.visdet.dropout_add_layer_norm_backward.default(
            *given, *saved, *ctx.options
        )
        grad_weight, grad_bias = parameter_gradients(
            ctx.parameters, lambda: column_sums(block_sums.flatten(1)).chunk(2)
        )
        has_residual = saved[1] is not None
        of_residual = grad_residual if has_residual else None
        return grad_input, of_residual, grad_weight, grad_bias, None, None, None, None, None
