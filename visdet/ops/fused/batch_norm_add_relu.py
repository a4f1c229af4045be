"""Batch normalisation in training together with a residual sum and ReLU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._arguments import check_that
from .._declared import declared
from .._library import CONSTANTS
from .._registration import differentiable_once
from ..tracing import is_traced
from ._gpu_rows import has_kernel, is_aligned, packed

__all__ = ["batch_norm_add_relu"]

_PACK = CONSTANTS.get("norm_pack", 1)  # channels that a thread holds side by side


@declared(
    input="floating [B, C, H, W]",
    residual="None or floating [B, C, H, W]",
    weight="floating [C]",
    bias="floating [C]",
    running_mean="None or floating [C]",
    running_var="None or floating [C]",
    num_batches_tracked="None or integers",
    momentum="number",
    eps="number, at least 0",
)
def batch_norm_add_relu(
    input: Tensor,  # [B, C, H, W]
    residual: Tensor | None,  # [B, C, H, W]
    weight: Tensor,  # [C]
    bias: Tensor,  # [C]
    running_mean: Tensor | None = None,  # [C]
    running_var: Tensor | None = None,  # [C]
    num_batches_tracked: Tensor | None = None,  # []
    momentum: float = 0.1,
    eps: float = 1e-5,
    relu: bool = True,
) -> Tensor:  # [B, C, H, W]
    """Return ``relu(batch_norm(input) + residual)``, normalised with the mean and the variance of this batch.

    On a GPU, three kernels compute it and three its gradients, without a pass over memory of their own for the sum and
    the ReLU. They compute in float32 and round once, and their sums do not depend on the order of blocks.

    Args:
        input: The output of a convolution, in any float type.
        residual: The tensor that is added before the ReLU, in the type of ``input``, or None.
        weight, bias: The scale and the shift of the normalisation.
        running_mean, running_var: Statistics that go ``momentum`` of the way to those of this batch, in place, or None.
            The variance is the unbiased one.
        num_batches_tracked: An int64 counter that is raised by 1 in place, or None.
        momentum: The part of the running statistics that is replaced.
        eps: The number that is added to the variance.
        relu: Whether negative sums become zero.

    Returns:
        A tensor of the shape, the type and the memory format of ``input``.

    Raises:
        ValueError: There is only one value for each channel, or a shape, type or number does not fit. The message names
            the argument.

    The kernels serve 16-bit and float32 input in the channels-last format with float32 weights and C that is a multiple
    of 8, on CUDA. Elsewhere, and under ``torch.compile`` and exports, torch's operators compute the same. It is
    differentiable once on a GPU.
    """
    if not _serves(input, residual, weight, bias, running_mean, running_var):
        op = "batch_norm_add_relu"
        has_several = is_traced() or input.numel() != input.shape[1]
        check_that(has_several, op, "input", "have more than 1 value per channel", input)
        if residual is not None:
            given = residual.dtype
            dtype = input.dtype
            check_that(given == dtype, op, "residual", "have the type of input {}", given, dtype)
        if (running_mean is None) != (running_var is None):
            raise ValueError(f"{op}: running_mean and running_var must be given together")
        if num_batches_tracked is not None:
            num_batches_tracked.add_(1)
        output = _batch_norm(input, running_mean, running_var, weight, bias, momentum, eps)
        output = output if residual is None else output + residual
        return F.relu(output, inplace=True) if relu else output
    return _BatchNormAddReLU.apply(
        input, residual, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps, relu
    )


def _serves(input: Tensor, residual: Tensor | None, *channels: Tensor | None) -> bool:
    """Return whether the kernels compute what torch's operators would."""
    C = input.shape[1]
    return (
        has_kernel("batch_norm_add_relu", input)
        and C % _PACK == 0
        and input.numel() > C
        and input.is_contiguous(memory_format=torch.channels_last)
        and (residual is None or residual.dtype == input.dtype)
        and (channels[2] is None) == (channels[3] is None)
        and all(
            vector.dtype == torch.float32 and vector.is_contiguous() and is_aligned(vector)
            for vector in channels
            if vector is not None
        )
    )


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    momentum: float,
    eps: float,
) -> Tensor:
    """Return torch's batch normalisation.

    On the CPU, torch's gradients take the weight of channels-last images for contiguous, and are wrong where images or
    the gradient of the result have unusual strides of dimensions of size 1.
    """
    if is_traced():
        return F.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
    if input.is_cuda:
        return _batch_norm_of_torch_on_cuda(input, running_mean, running_var, weight, bias, momentum, eps)
    _, C, H, W = input.shape
    if input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous():
        input = _with_strides(input, (H * W * C, 1, W * C, C))
    output = F.batch_norm(input, running_mean, running_var, weight.contiguous(), bias, True, momentum, eps)
    if output.requires_grad:
        strides = output.stride()
        output.register_hook(lambda grad: grad if grad is None else _with_strides(grad, strides))
    return output


def _batch_norm_of_torch_on_cuda(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    momentum: float,
    eps: float,
) -> Tensor:
    """Return torch's batch normalisation, whose kernels fail if a tensor does not begin at a multiple of 16 bytes."""
    input = input if is_aligned(input) else input.clone()
    mean, var = (None if x is None else packed(x) for x in (running_mean, running_var))
    output = F.batch_norm(input, mean, var, packed(weight), packed(bias), True, momentum, eps)
    for original, updated in ((running_mean, mean), (running_var, var)):
        if original is not None and updated is not None and updated is not original:
            original.copy_(updated)
    if output.requires_grad:
        output.register_hook(lambda grad: grad if grad is None or is_aligned(grad) else grad.clone())
    return output


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def _rows(images: Tensor) -> Tensor:
    """Return the images as packed [B, H, W, C]."""
    return packed(images.permute(0, 2, 3, 1))


def _images(rows: Tensor) -> Tensor:
    return rows.permute(0, 3, 1, 2)


class _BatchNormAddReLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        rows = _rows(input)
        has_residual = residual is not None
        output_rows, statistics = torch.ops.visdet.batch_norm_add_relu.default(
            rows,
            None if residual is None else _rows(residual),
            weight,
            bias,
            running_mean,
            running_var,
            num_batches_tracked,
            momentum,
            eps,
            relu,
        )
        # A view that an autograd.Function returns may not be changed in place, as a ReLU behind it does.
        images = _images(output_rows)
        output = images.new_empty(0).set_(
            images.untyped_storage(), images.storage_offset(), images.shape, images.stride()
        )
        # Without a residual, the sign of the output follows from the input.
        mask = output if relu and has_residual else None
        ctx.save_for_backward(rows, mask, weight, bias, statistics)
        ctx.relu = relu
        ctx.has_residual = has_residual
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, mask, weight, bias, statistics = ctx.saved_tensors
        grads = _rows(grad_output.to(rows))
        mask = None if mask is None else _rows(mask)
        grad_input, grad_residual, sums = torch.ops.visdet.batch_norm_add_relu_backward.default(
            grads, rows, mask, weight, bias, statistics, ctx.relu
        )
        grad_weight, grad_bias = sums.unbind()
        if not ctx.has_residual:
            grad_residual = None
        elif mask is None:
            grad_residual = grads
        if grad_residual is not None:
            grad_residual = _images(grad_residual)
        return _images(grad_input), grad_residual, grad_weight, grad_bias, *[None] * 6
