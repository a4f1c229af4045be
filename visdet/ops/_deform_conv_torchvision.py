"""Deformable convolution by torchvision's operator, for devices whose library of visdet is not built."""

from typing import Any

import torch
from torch import Tensor

from ._deform_conv_inputs import tap_positions

__all__ = ["convolve_by_torchvision"]


def convolve_by_torchvision(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    """Return torchvision's deformable convolution with visdet's rules for offsets. B must be positive."""
    from torchvision.ops import deform_conv2d

    offset = _within_reach(offset, input.shape[2:], padding)
    if offset.requires_grad and torch.is_grad_enabled():
        offset = _off_the_border(offset, weight.shape[2:], stride, padding, dilation)
    return deform_conv2d(
        input, offset, weight, bias, stride=stride, padding=padding, dilation=dilation, mask=mask
    )


def _within_reach(offset: Tensor, size: Any, padding: tuple[int, int]) -> Tensor:
    """Return the offsets after replacing those that are NaN or too large by an offset that leads out of every map.

    If a position is NaN, torchvision reads pixels outside the memory of the image.
    """
    reach = 2.0 * (sum(size) + 2 * sum(padding) + 1)
    return torch.where(offset.abs() < reach, offset, -reach)


def _off_the_border(offset: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Return the offsets after subtracting 1 from those that lead to exactly -1, so that they have no gradient.

    Offsets start at 0, where the outer taps of a padding of 1 are at -1. torchvision gives such an offset the gradient
    of a sample inside the map.
    """
    with torch.no_grad():
        y, x = tap_positions(offset, kernel_size, stride, padding, dilation)
        position = torch.stack(torch.broadcast_tensors(y, x), 2)  # [KH, KW, 2, H', W']
        offset_of_tap = offset.view(offset.shape[0], -1, *position.shape)  # [B, G, KH, KW, 2, H', W']
        is_border = (offset_of_tap + position == -1).flatten(1, 4)
    # This takes one launch in the forward pass and none in the backward pass.
    return offset - is_border.to(offset.dtype)
