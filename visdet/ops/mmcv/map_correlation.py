"""Masks of point-wise spatial attention, correlation of two maps, and shifts along time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._arguments import check_that, is_index, numbers_to, widened
from .._declared import declared

__all__ = ["correlation", "psa_mask", "tin_shift"]


@declared(
    input="real [B, M, H, W]", psa_type="one of 'collect', 'distribute'", mask_size="2 integers, at least 1"
)
def psa_mask(
    input: Tensor,  # [B, MH * MW, H, W]
    psa_type: str,
    mask_size: tuple[int, int],
) -> Tensor:  # [B, H * W, H, W]
    """Return attention between all pixels, of masks that are centered on each pixel.

    Args:
        input: [B, MH * MW, H, W]. The mask of each pixel.
        psa_type: 'collect', where the channel is the pixel that is attended to, or 'distribute', where it is the one
            that attends.
        mask_size: (MH, MW).

    Returns:
        [B, H * W, H, W]. The attention. It is 0 outside the mask.

    It is differentiable.

    Raises:
        ValueError: A size or ``psa_type`` does not fit. The message names the argument.

    Source: Paper "PSANet" (Zhao et al.). The signature is mmcv's.
    """
    MH, MW = mask_size
    B, M, H, W = input.shape
    check_that(M == MH * MW, "psa_mask", "input", "be [B, {}, H, W]", input, MH * MW)
    y, x = numbers_to(H, input), numbers_to(W, input)
    # Rows and columns of the mask of each second pixel in which the first one is, [H, H] and [W, W].
    row, column = y[:, None] - y + (MH - 1) // 2, x[:, None] - x + (MW - 1) // 2
    is_inside = is_index(row, MH)[:, None, :, None] & is_index(column, MW)[None, :, None]
    row, column = row.clamp(0, MH - 1)[:, None, :, None], column.clamp(0, MW - 1)[None, :, None]
    attention = torch.where(is_inside, input[:, row * MW + column, y[:, None], x], 0)
    if psa_type == "distribute":
        attention = attention.permute(0, 3, 4, 1, 2)
    return attention.reshape(B, H * W, H, W)


@declared(
    input1="floating [B, C, H, W]",
    input2="floating [B, C, H, W]",
    kernel_size="2 integers, at least 1",
    patch_size="2 integers, at least 1, at most 320",
    stride="2 integers, at least 1",
    padding="2 integers, at least 0",
    dilation="2 integers, at least 1",
    dilation_patch="2 integers, at least 1",
)
def correlation(
    input1: Tensor,  # [B, C, H, W]
    input2: Tensor,  # [B, C, H, W]
    kernel_size: tuple[int, int],
    patch_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    dilation_patch: tuple[int, int],
) -> Tensor:  # [B, PH, PW, OH, OW]
    """Return the dot products of windows of two maps, for each displacement of a patch.

    Args:
        input1: [B, C, H, W]. The first map.
        input2: [B, C, H, W]. The second map, which is displaced.
        kernel_size: The size of a window (height, width).
        patch_size: The number of displacements (height, width), each at most 320.
        stride: The distance of windows.
        padding: The rows and columns of zeros around both maps.
        dilation: The distance of the pixels of a window.
        dilation_patch: The distance of displacements.

    Returns:
        [B, PH, PW, OH, OW]. The dot products. 16-bit types are summed in float32.

    It is differentiable.

    Raises:
        ValueError: A size, type or device does not fit. The message names the argument.

    Source: Paper "FlowNet" (Dosovitskiy et al.). mmcv's gradient ignores ``dilation_patch`` in the extent of the patch,
    and this one does not.
    """
    extra = [distance * (count - 1) for count, distance in zip(patch_size, dilation_patch, strict=True)]
    (top, left), (down, across) = (length // 2 for length in extra), padding
    # Displaced pixels outside the map are 0.
    edges = (across + left, across + extra[1] - left, down + top, down + extra[0] - top)
    one = F.pad(widened(input1, input1), (across, across, down, down))
    other = F.pad(widened(input2, input1), edges)
    H, W = one.shape[2:]
    window = [distance * (count - 1) + 1 for count, distance in zip(kernel_size, dilation, strict=True)]
    fits, expected = window[0] <= H and window[1] <= W, "hold a window of {} with its padding"
    check_that(fits, "correlation", "input1", expected, [H, W], window)
    ones = one.new_ones(1, 1, *kernel_size)
    stride = min(stride[0], H), min(stride[1], W)  # as in upfirdn2d
    rows = []
    for i in range(patch_size[0]):
        y = i * dilation_patch[0]
        products = [
            (one * other[:, :, y : y + H, x : x + W]).sum(1, keepdim=True)
            for x in range(0, extra[1] + 1, dilation_patch[1])
        ]
        sums = [F.conv2d(p, ones, None, stride, 0, dilation) for p in products]
        rows.append(torch.cat(sums, 1))
    return torch.stack(rows, 1).to(input1)


@declared(input="real [B, T, C, S]", shift="integers [B, G]")
def tin_shift(
    input: Tensor,  # [B, T, C, S]
    shift: Tensor,  # [B, G]
) -> Tensor:  # [B, T, C, S]
    """Return maps whose groups of channels are shifted along time.

    Args:
        input: [B, T, C, S]. The maps of T frames.
        shift: [B, G], integers. The frames by which each group of channels is shifted towards later frames.

    Returns:
        [B, T, C, S]. The maps, with 0 where nothing is shifted to.

    It is differentiable with respect to ``input``.

    Raises:
        ValueError: A size or type does not fit. The message names the argument.
        RuntimeError: ``shift`` is on another device.

    Source: Paper "Temporal Interlacing Network" (Shao et al.). The signature is mmcv's.
    """
    B, T, C, S = input.shape
    G = shift.shape[1]
    check_that(G > 0 and C % G == 0, "tin_shift", "C", "be a multiple of the {} groups of shift", C, G)
    by = shift.long().repeat_interleave(C // G, 1)[:, None]  # [B, 1, C]
    frame = numbers_to(T, input)[:, None] - by
    is_inside = is_index(frame, T)[..., None]
    source = frame.clamp(0, max(T - 1, 0))[..., None].expand(B, T, C, S)
    return torch.where(is_inside, input.gather(1, source), 0)
