"""Modulated deformable convolution: each tap of the kernel has an offset and a factor."""

from torch import Tensor

from ._deform_conv_inputs import Pair, check_shapes
from .deform_conv2d import convolve

__all__ = ["modulated_deform_conv2d"]


def modulated_deform_conv2d(
    input: Tensor,  # [B, C, H, W]
    offset: Tensor,  # [B, G * 2 * KH * KW, H', W'] (y, x) of each tap
    mask: Tensor,  # [B, G * KH * KW, H', W']
    weight: Tensor,  # [C', C / groups, KH, KW]
    bias: Tensor | None = None,  # [C']
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    deform_groups: int = 1,
) -> Tensor:  # [B, C', H', W']
    """Return ``deform_conv2d`` with the sample of each tap multiplied by ``mask``, plus ``bias``.

    Args:
        input: See ``deform_conv2d``, as for the arguments that are not named here.
        mask: The factors of the taps, any numbers; usually results of a sigmoid.
        bias: The number added to each output channel, or None.

    Returns:
        The convolution, in the type of ``offset``.

    It is differentiable once with respect to all tensors. Types, borders, determinism and who serves the call are
    those of ``deform_conv2d``.

    Raises:
        ValueError: A shape or a number does not fit; the message names the argument.
        RuntimeError: On CUDA, deterministic algorithms were switched on between the forward and the backward.

    Source: Deformable ConvNets v2, arXiv 1811.11168; the signature is mmcv's.
    """
    settings = (stride, padding, dilation)
    check_shapes("modulated_deform_conv2d", input, offset, mask, weight, settings, groups, deform_groups)
    return convolve(input, offset, mask, weight, bias, *settings, deform_groups)
