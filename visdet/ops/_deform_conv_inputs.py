"""Functions on the arguments of deformable convolutions: checks of shapes, the result's size, and tap positions."""

from typing import Any

import torch
from torch import Tensor

from ._arguments import pair

__all__ = ["Pair", "check_shapes", "output_shape", "tap_positions"]

Pair = int | tuple[int, int]


def output_shape(
    input: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[int, int]:
    """Return (height, width) of the result."""
    settings = zip(
        input.shape[2:], weight.shape[2:], pair(stride), pair(padding), pair(dilation), strict=True
    )
    height, width = ((size + 2 * pad - dil * (k - 1) - 1) // step + 1 for size, k, step, pad, dil in settings)
    return height, width


def check_shapes(
    operator: str,
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    settings: tuple[Pair, Pair, Pair],  # stride, padding, dilation
    groups: int,
    deform_groups: int,
) -> None:
    """Raise a ValueError that names the operator and the argument if a shape does not fit."""
    size = output_shape(input, weight, *settings)
    if min(size) <= 0:
        raise ValueError(
            f"{operator}: input {list(input.shape[2:])} is too small, the output would be {list(size)}"
        )
    B, C = input.shape[:2]
    if weight.shape[1] * groups != C:
        raise ValueError(f"{operator}: input must have {weight.shape[1] * groups} channels, got {C}")
    if C % deform_groups:
        raise ValueError(f"{operator}: deform_groups must divide {C} channels, got {deform_groups}")
    if weight.shape[0] % groups:
        raise ValueError(
            f"{operator}: weight must have a multiple of {groups} output channels, got {weight.shape[0]}"
        )
    taps = deform_groups * weight.shape[2] * weight.shape[3]
    for name, field, channels in (("offset", offset, 2 * taps), ("mask", mask, taps)):
        expected = [B, channels, *size]
        if field is not None and list(field.shape) != expected:
            raise ValueError(f"{operator}: {name} must be {expected}, got {list(field.shape)}")


def tap_positions(
    offset: Tensor, kernel_size: tuple[int, int], stride: Any, padding: Any, dilation: Any
) -> tuple[Tensor, Tensor]:
    """Return the (row, column) of each tap without its offset, [KH, 1, H', 1] and [1, KW, 1, W'], in offset's type."""
    (KH, KW), (height, width) = kernel_size, offset.shape[2:]

    def spaced(start: int, count: int, step: int) -> Tensor:
        return torch.arange(start, start + count * step, step, device=offset.device, dtype=offset.dtype)

    tap_y, tap_x = spaced(-padding[0], KH, dilation[0]), spaced(-padding[1], KW, dilation[1])
    row, column = spaced(0, height, stride[0]), spaced(0, width, stride[1])
    return (tap_y[:, None] + row)[:, None, :, None], (tap_x[:, None] + column)[None, :, None]
