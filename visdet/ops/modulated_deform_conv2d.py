"""Modulated deformable convolution, in which each tap of the kernel has an offset and a factor."""

from torch import Tensor

from ._declared import declared
from .deform_conv2d import Pair, convolve

__all__ = ["modulated_deform_conv2d"]


@declared(
    input="real [B, C, H, W]",
    offset="floating",
    mask="real",
    weight="real [O, I, KH, KW]",
    bias="None or real [O]",
    stride="1 or 2 integers, at least 1",
    padding="1 or 2 integers, at least 0",
    dilation="1 or 2 integers, at least 1",
    groups="integer, at least 1",
    deform_groups="integer, at least 1",
)
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
        input: [B, C, H, W]. The map, of any floating-point type.
        offset: [B, G * 2 * KH * KW, H', W'] (y, x) of each tap. The offsets in pixels, one field for each of the
            ``deform_groups`` (G) groups of channels. The result has their type.
        mask: [B, G * KH * KW, H', W']. The factors of the taps. They may be any numbers and are usually results of a
            sigmoid.
        weight: [C', C / groups, KH, KW]. The kernel. H' and W' are those of the convolution without offsets.
        bias: [C']. The number added to each output channel, or None.
        stride: (height, width) of the step between neighbouring outputs, or one number for both.
        padding: (height, width) of the border of zeros, or one number for both.
        dilation: (height, width) of the distance between neighbouring taps, or one number for both.
        groups: The number of groups of channels that are convolved separately; it divides C and C'.
        deform_groups: The number of groups of channels that have offsets of their own; it divides C.

    Returns:
        [B, C', H', W']. The convolution, in the type of ``offset``.

    It is differentiable with respect to all tensors. Types, borders, determinism and who serves the call are
    those of ``deform_conv2d``.

    Raises:
        ValueError: A shape, a number or the type of ``offset`` does not fit. The message names the argument.

    Source: Deformable ConvNets v2, arXiv 1811.11168; the signature is mmcv's.
    """
    tensors = input, offset, mask, weight, bias
    return convolve("modulated_deform_conv2d", *tensors, stride, padding, dilation, groups, deform_groups)
