"""Batch normalisation by fixed statistics, whose 16-bit input becomes float32."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._gpu_rows import has_kernel, packed

__all__ = ["frozen_batch_norm"]


def frozen_batch_norm(
    input: Tensor,  # [B, C, H, W]
    weight: Tensor,  # [C]
    bias: Tensor,  # [C]
    running_mean: Tensor,  # [C]
    running_var: Tensor,  # [C]
    eps: float = 1e-5,
) -> Tensor:  # [B, C, H, W]
    """Return ``(input - running_mean) / sqrt(running_var + eps) * weight + bias``, of which only input has a gradient.

    On a GPU, one kernel computes it from a 16-bit input and float32 statistics, as autocast leaves them, and one its
    gradient. Elsewhere, and under ``torch.compile`` and exports, torch's operators compute the same.

    Args:
        input: The output of a convolution, in any float type.
        weight, bias: The scale and the shift, without gradients and in one type with the statistics.
        running_mean, running_var: The mean and the variance of each channel.
        eps: The number that is added to the variance.

    Returns:
        A tensor of the shape of ``input``, in the wider type of input and statistics.

    Raises:
        ValueError: A shape does not fit. The message names the argument.
    """
    if input.dim() != 4:
        raise ValueError(f"frozen_batch_norm: input must be [B, C, H, W], got {list(input.shape)}")
    vectors = (weight, bias, running_mean, running_var)
    for name, vector in zip(("weight", "bias", "running_mean", "running_var"), vectors, strict=True):
        if vector.shape != input.shape[1:2]:
            expected = list(input.shape[1:2])
            raise ValueError(f"frozen_batch_norm: {name} must be [C] = {expected}, got {list(vector.shape)}")
    # In its gradient, torch's batch_norm on the CPU reads wrong numbers of strided tensors. It is used forward alone.
    weight, bias, running_mean, running_var = (vector.contiguous() for vector in vectors)
    if input.dtype != weight.dtype and not _serves(input, weight):
        scale = weight * (running_var + eps).rsqrt()
        shift = bias - running_mean * scale
        return input * scale[:, None, None] + shift[:, None, None]
    if not (input.requires_grad and torch.is_grad_enabled()):
        return _normalise(input, weight, bias, running_mean, running_var, eps)
    return _FrozenBatchNorm.apply(input, weight, bias, running_mean, running_var, eps)


def _serves(input: Tensor, weight: Tensor) -> bool:
    """Return whether a kernel computes what torch's operators would."""
    is_widened = input.dtype != torch.float32 and weight.dtype == torch.float32
    return is_widened and has_kernel("frozen_batch_norm", input) and input.dim() == 4


def _normalise(
    input: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    if input.dtype == weight.dtype:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training=False, eps=eps)
    operator = torch.ops.visdet.frozen_batch_norm.default
    return operator(_dense(input), weight, bias, running_mean, running_var, eps)


def _dense(values: Tensor) -> Tensor:
    """Return values that are contiguous or channels-last, at an address from which the kernels can load 16 bytes."""
    if values.is_contiguous(memory_format=torch.channels_last) and values.data_ptr() % 16 == 0:
        return values
    return packed(values)


class _FrozenBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, *options: Any) -> Tensor:
        _, _, variance, eps = options
        ctx.save_for_backward(weight, variance)
        ctx.options = eps, input.dtype
        return _normalise(input, weight, *options)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        weight, variance = ctx.saved_tensors
        eps, dtype = ctx.options
        # The kernel could not be differentiated in turn.
        if dtype == weight.dtype or torch.is_grad_enabled():
            scale = weight * (variance + eps).rsqrt()
            return (grad_output * scale[:, None, None]).to(dtype), *[None] * 5
        operator = torch.ops.visdet.frozen_batch_norm_backward.default
        return operator(_dense(grad_output), weight, variance, eps, dtype), *[None] * 5
