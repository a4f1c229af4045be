"""Places of the taps of a deformable convolution, and offsets that torchvision's kernel takes without harm."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["off_the_border", "places", "within_reach"]


def within_reach(offset: Tensor, size: Any, padding: tuple[int, int]) -> Tensor:
    """Return the offsets, those that lead out of any map of this size, or nowhere, as one that surely leads out.

    torchvision takes the pixels around a place that is NaN from outside the image's memory.
    """
    reach = 2.0 * (sum(size) + 2 * sum(padding) + 1)
    return torch.where(offset.abs() < reach, offset, -reach)


def places(
    offset: Tensor, kernel_size: tuple[int, int], stride: Any, padding: Any, dilation: Any
) -> tuple[Tensor, Tensor]:
    """Return the unmoved (row, column) of each tap, [KH, 1, H', 1] and [1, KW, 1, W'], in offset's type."""
    (KH, KW), (height, width) = kernel_size, offset.shape[2:]

    def spaced(start: int, count: int, step: int) -> Tensor:
        return torch.arange(start, start + count * step, step, device=offset.device, dtype=offset.dtype)

    tap_y, tap_x = spaced(-padding[0], KH, dilation[0]), spaced(-padding[1], KW, dilation[1])
    row, column = spaced(0, height, stride[0]), spaced(0, width, stride[1])
    return (tap_y[:, None] + row)[:, None, :, None], (tap_x[:, None] + column)[None, :, None]


def off_the_border(offset: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Return the offsets, those that lead to exactly -1 one less: outside, without a gradient.

    Offsets start at 0, where every tap of the padding is at -1; torchvision gives it the gradient of a sample inside.
    """
    with torch.no_grad():
        y, x = places(offset, kernel_size, stride, padding, dilation)
        place = torch.stack(torch.broadcast_tensors(y, x), 2)  # [KH, KW, 2, H', W']
        moves = offset.view(offset.shape[0], -1, *place.shape)  # [B, G, KH, KW, 2, H', W']
        is_border = (moves + place == -1).flatten(1, 4)
    return offset - is_border.to(offset.dtype)  # one launch for autograd, none in the backward
