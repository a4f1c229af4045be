"""Bilinear samples of feature maps inside regions, in plain torch, by the border rule of RoIAlign."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = ["check_rois", "pair", "pool_samples"]

# Values gathered at a time: bounds the memory of a call without gradients to some hundred megabytes.
CHUNK_VALUES = 1 << 24


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of one number or two."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def check_rois(op: str, input: Tensor, rois: Tensor) -> None:
    """Raise ValueError unless input is [B, C, H, W] and rois [N, 5] on the same device."""
    if input.dim() != 4:
        raise ValueError(f"{op}: input must be [B, C, H, W], got {list(input.shape)}")
    if rois.dim() != 2 or rois.shape[1] != 5:
        raise ValueError(f"{op}: rois must be [N, 5] (batch index, x1, y1, x2, y2), got {list(rois.shape)}")
    if rois.device != input.device:
        raise ValueError(f"{op}: rois must be on {input.device}, got {rois.device}")


def _corners(position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return lower and upper index, the weight of the upper, and whether the sample counts (-1 <= position <= size)."""
    counts = (position >= -1) & (position <= size)
    position = torch.where(counts, position, 0).clamp(min=0)
    low = position.detach().floor().long().clamp(max=size - 1)
    high = (low + 1).clamp(max=size - 1)
    fraction = torch.where(low < size - 1, position - low, 0)
    return low, high, fraction, counts


def _sample(rows: Tensor, first_row: Tensor, y: Tensor, x: Tensor, H: int, W: int) -> Tensor:
    """Return [n, K, C] samples at y, x [n, K] of the map at ``first_row`` [n] of rows [B * H * W, C]."""
    y0, y1, fy, y_counts = _corners(y, H)
    x0, x1, fx, x_counts = _corners(x, W)
    counts = (y_counts & x_counts).to(rows.dtype)
    total = rows.new_zeros(())
    for row, wy in ((y0, 1 - fy), (y1, fy)):
        for column, wx in ((x0, 1 - fx), (x1, fx)):
            values = rows[(first_row[:, None] + row * W + column).flatten()].view(*y.shape, -1)
            total = total + (wy * wx * counts)[..., None] * values
    return total


def _groups(grid: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (samples down, samples across, indices) of the regions that have the same counts [N, 2]."""
    for count in grid.unique(dim=0):
        yield int(count[0]), int(count[1]), (grid == count).all(1).nonzero().squeeze(1)


def pool_samples(
    input: Tensor,  # [B, C, H, W]
    batch: Tensor,  # [N] int64
    origin: Tensor,  # [N, 2, PH, PW] (y, x) of each bin's corner, in pixels
    bin_size: Tensor,  # [N, 2]
    grid: Tensor,  # [N, 2] int64: samples down and across a bin
    reduce: Callable[[Tensor], Tensor],  # [n, PH * PW, samples, C] to [n, PH * PW, C]
) -> Tensor:  # [N, C, PH, PW]
    """Return each bin's samples, reduced; a bin without samples gives 0."""
    B, C, H, W = input.shape
    N, _, PH, PW = origin.shape
    output = input.new_zeros(N, PH * PW, C)
    if output.numel() == 0 or input.numel() == 0:
        return output.transpose(1, 2).reshape(N, C, PH, PW) + 0 * (input.sum() + origin.sum())
    rows = input.permute(0, 2, 3, 1).reshape(B * H * W, C)
    parts, members_of_parts = [], []
    for down, across, all_members in _groups(grid):
        if down <= 0 or across <= 0:
            continue
        per_region = PH * PW * down * across * C
        for members in all_members.split(max(CHUNK_VALUES // per_region, 1)):
            step = bin_size[members] / bin_size.new_tensor([down, across])  # [n, 2]
            inside_y = (torch.arange(down, device=rows.device).to(step) + 0.5) * step[:, :1]  # [n, down]
            inside_x = (torch.arange(across, device=rows.device).to(step) + 0.5) * step[:, 1:]  # [n, across]
            corner = origin[members].flatten(2)  # [n, 2, PH * PW]
            shape = (len(members), PH * PW, down, across)
            y = (corner[:, 0, :, None, None] + inside_y[:, None, :, None]).expand(shape).flatten(1)
            x = (corner[:, 1, :, None, None] + inside_x[:, None, None, :]).expand(shape).flatten(1)
            samples = _sample(rows, batch[members] * (H * W), y, x, H, W)
            parts.append(reduce(samples.view(len(members), PH * PW, down * across, C)))
            members_of_parts.append(members)
    if parts:
        output = output.index_copy(0, torch.cat(members_of_parts), torch.cat(parts).to(output.dtype))
    return output.transpose(1, 2).reshape(N, C, PH, PW)
