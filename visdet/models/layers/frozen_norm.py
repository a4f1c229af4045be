"""Folding of convolutions and the frozen batch norms that follow them into one convolution each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.ops.fused import differentiable_once, parameter_gradients
from visdet.ops.tracing import is_traced

from .normalization import BatchNorm2d, add_relu
from .plain import is_plain
from .precision import HALF_TYPES, as_autocast_input, autocast_dtype

# This is the count of 16-bit numbers in 16 bytes. cuDNN reads a bias in pieces of 16 bytes, and the process crashes if
# the bias does not begin at a multiple of 16 bytes.
_BIAS_MULTIPLE = 8


class FoldedConv(NamedTuple):
    """A convolution and its batch norm as one convolution.

    Its weight [O, I, h, w] has been multiplied by the scale of the batch norm, and its bias [O] is the shift.
    """

    weight: Tensor
    bias: Tensor | None
    geometry: tuple[Any, ...] = ((1, 1), (0, 0), (1, 1), 1)  # stride, padding, dilation, groups

    def __call__(self, x: Tensor, relu: bool = True, residual: Tensor | None = None) -> Tensor:
        """Return norm(conv(x)) + residual, or the ReLU of that sum."""
        bias = self.bias
        weight = self.weight
        x = as_autocast_input(x)
        if relu and bias is not None and _has_fused_kernel(x, weight, residual):
            # A node of the autograd graph takes the host time even if there are no gradients.
            run = _ConvBiasReLU.apply if torch.is_grad_enabled() else _conv_bias_relu
            return run(x, weight, bias, residual, *self.geometry)
        return add_relu(F.conv2d(x, weight, bias, *self.geometry), residual, relu)


def with_one_bias(branch: FoldedConv, last: FoldedConv, x: Tensor) -> tuple[FoldedConv, FoldedConv]:
    """Return two convolutions whose outputs are added before a ReLU, the first of which gives its bias to the second.

    torch adds the bias of a convolution by a kernel of its own, but not where the second adds the other's output.

    Args:
        x: the input of ``branch``.
    """
    x = as_autocast_input(x)
    if branch.bias is None or last.bias is None or not _has_fused_kernel(x, last.weight, residual=x):
        return branch, last
    return branch._replace(bias=None), last._replace(bias=last.bias + branch.bias)


def fold_frozen_norms(layers: Sequence[tuple[nn.Module, nn.Module]]) -> dict[nn.Module, FoldedConv]:
    """Return the convolution that replaces each convolution and its frozen batch norm. Other pairs are left out.

    A batch norm is frozen if it uses its stored statistics, and its scale and shift get no gradients. norm(conv(x)) is
    then a convolution with weight · scale and a bias, which saves one pass over the feature maps. The convolution
    itself may be trained. Weights have the dtype that autocast gives a convolution, and on a GPU the channels-last
    layout. Nothing is kept from call to call. Layers that are not plain are left out.

    Args:
        layers: pairs of a convolution and its normalisation.
    """
    layers = [(conv, norm) for conv, norm in layers if _is_foldable(conv, norm)]
    layers = [(conv, norm) for conv, norm in layers if norm.eps == layers[0][1].eps]
    if not layers:
        return {}
    convs, norms = zip(*layers, strict=True)
    sizes = [norm.num_features for norm in norms]
    dtype = autocast_dtype(convs[0].weight)
    with torch.no_grad():
        weight, bias, mean, variance = (
            torch.cat([getattr(norm, name) for norm in norms])
            for name in ("weight", "bias", "running_mean", "running_var")
        )
        scale = weight * torch.rsqrt(variance + norms[0].eps)
        shifts = (bias - mean * scale).to(dtype).split(sizes)
        if any(size % _BIAS_MULTIPLE for size in sizes):
            shifts = [shift.clone() for shift in shifts]
        scales = scale.view(-1, 1, 1, 1).split(sizes)
    layout = torch.channels_last if scale.is_cuda else torch.preserve_format
    folded = {}
    for conv, scale, shift in zip(convs, scales, shifts, strict=True):
        weight = _product(conv.weight, scale, dtype, layout)
        folded[conv] = FoldedConv(weight, shift, (conv.stride, conv.padding, conv.dilation, conv.groups))
    return folded


def _product(weight: Tensor, scale: Tensor, dtype: torch.dtype, layout: torch.memory_format) -> Tensor:
    """Return the product in a dtype and a layout, without gradients and on a GPU by one kernel."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return torch.mul(weight, scale, out=torch.empty_like(weight, dtype=dtype, memory_format=layout))
    if weight.is_cuda and not is_traced():
        return _Product.apply(weight, scale, dtype, layout)
    return (weight * scale).to(dtype, memory_format=layout)


class _Product(torch.autograd.Function):
    """``_product`` with its gradient, which one kernel computes, too."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, scale: Tensor, dtype: torch.dtype, layout: torch.memory_format
    ) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(scale)
        return _product(weight, scale, dtype, layout)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        weight = ctx.weight

        def of_weight() -> list[Tensor]:
            return [torch.mul(grad, scale, out=torch.empty_like(weight, requires_grad=False))]

        return parameter_gradients([weight], of_weight)[0], None, None, None


def _is_foldable(conv: nn.Module, norm: nn.Module) -> bool:
    if not is_plain(conv, nn.Conv2d) or not is_plain(norm, nn.BatchNorm2d, BatchNorm2d, nn.SyncBatchNorm):
        return False
    if norm.training or norm.running_mean is None or conv.bias is not None or conv.padding_mode != "zeros":
        return False
    # FSDP takes parameters away from the layers whose weights processes share.
    if len([*conv.parameters(), *norm.parameters()]) < 3:
        return False
    return not (torch.is_grad_enabled() and (norm.weight.requires_grad or norm.bias.requires_grad))


def _conv_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *geometry: Any
) -> Tensor:
    """Return relu(conv(x) + bias + residual) by one kernel of cuDNN, in a third of the time of three kernels."""
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, *geometry)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *geometry)


class _ConvBiasReLU(torch.autograd.Function):
    """``_conv_bias_relu`` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *geometry: Any
    ) -> Tensor:
        out = _conv_bias_relu(x, weight, bias, residual, *geometry)
        ctx.save_for_backward(x, weight, out)
        ctx.geometry = geometry
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        of_x, of_weight, _, of_residual = ctx.needs_input_grad[:4]
        grad = torch.ops.aten.threshold_backward(grad, out, 0)
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, padding, dilation, False, (0, 0), groups, (of_x, of_weight, False)
        )
        return grad_x, grad_weight, None, grad if of_residual else None, None, None, None, None


def _has_fused_kernel(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """Return whether cuDNN's kernel is available and faster. With a residual, it is faster for 16-bit dtypes only."""
    dtype = x.dtype
    if not x.is_cuda or dtype != weight.dtype or is_traced():
        return False
    cudnn = torch.backends.cudnn
    # ROCm has none of these kernels, although torch says there that cuDNN is available.
    if torch.version.cuda is None or not (cudnn.enabled and cudnn.is_available()):
        return False
    if residual is None:
        return dtype in (torch.float32, *HALF_TYPES)
    return residual.dtype == dtype and dtype in HALF_TYPES
