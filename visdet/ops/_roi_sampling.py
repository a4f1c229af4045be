"""Bilinear sampling of feature maps inside regions in plain torch, with the border rule of RoIAlign."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._arguments import computation_dtype, empty_sum, is_index, numbers_to
from .tracing import recorded_as_one

__all__ = [
    "MAP",
    "ROTATED",
    "UPRIGHT",
    "Corners",
    "blended",
    "bounded_rois",
    "bounds_of",
    "check_samples",
    "empty_maps",
    "pool_bins",
    "pool_regions",
    "pool_samples",
    "samples_of",
]

# This many values are gathered at a time. It limits the memory of a call without gradients to some hundred megabytes.
CHUNK_VALUES = 1 << 24

# A region is cut this many pixels outside the map, because float32 cannot represent half pixels there.
FURTHEST = 1 << 24
# If the number of samples grows with the region, it is cut at the length of the map's longer side, but at least here.
LEAST_REACH = 128
# A region is then not much longer than this, so that the samples of a channel can be counted in 31 bits.
LARGEST_SIDE = 46000


MAP = "floating [B, C, H, W]"
UPRIGHT = "real [N, 5] (batch index, x1, y1, x2, y2)"
ROTATED = "real [N, 6] (batch index, x, y, w, h, angle)"


def check_samples(op: str, size: tuple[int, int], sampling_ratio: int = 1) -> None:
    """Raise ValueError unless the samples of a region can be counted in 31 bits."""
    if max(sampling_ratio, 1) ** 2 * size[0] * size[1] >= 1 << 31:
        raise ValueError(
            f"{op}: output_size and sampling_ratio must give a region fewer than 2^31 samples, got {tuple(size)} and "
            f"{sampling_ratio}"
        )


def _larger(one: Any, other: Any) -> Any:
    """Return the larger number, without adding a guard if one of them is a symbol of torch.export.

    torch.compile of torch 2.10 supports ``sym_max`` for symbols only.
    """
    return max(one, other) if _are_numbers(one, other) else torch.sym_max(one, other)


def _smaller(one: Any, other: Any) -> Any:
    return min(one, other) if _are_numbers(one, other) else torch.sym_min(one, other)


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def empty_maps(grad_output: Tensor, rois: Tensor, B: int, H: int, W: int, *_: Any) -> Tensor:
    """Return maps without data for the gradient [B, C, H, W] of maps whose regions are pooled."""
    return grad_output.new_empty(B, grad_output.shape[1], H, W)


def is_image(index: Tensor, B: int) -> Tensor:
    """Return whether each batch index is one of the whole numbers 0 to B - 1."""
    return is_index(index, B) & (index == index.floor())


@torch.no_grad()
def bounded_rois(
    rois: Tensor,  # [N, 5], or [N, 6] (batch index, x, y, w, h, angle)
    input: Tensor,  # [B, C, H, W], not empty
    spatial_scale: float,
    sampling_ratio: int,
    dtype: torch.dtype,
) -> Tensor:  # in dtype
    """Return the regions after invalid and huge numbers have been replaced, by tensor arithmetic alone.

    A region whose batch index is not one of the whole numbers 0..B-1, or one that has a NaN, is moved off the map,
    where all samples are 0 and have no gradient. Other regions are cut if they end more than ``FURTHEST`` pixels
    outside the map. If the number of samples grows with the region, they are cut closer to it. Of rotated
    regions, the centres and the sides are cut.
    """
    low, high = bounds_of(input, spatial_scale, sampling_ratio, dtype)
    bounded = rois.to(dtype).clone()
    places, extents, angle = bounded[:, 1:3], bounded[:, 3:5], bounded[:, 5:]
    is_missing = ~is_image(bounded[:, 0], input.shape[0]) | bounded.isnan().any(1) | angle.isinf().any(1)
    is_missing = is_missing[:, None]
    bounded.masked_fill_(is_missing, 0)
    places.clamp_(low, high).masked_fill_(is_missing, low)
    if bounded.shape[1] == 6:
        extents.clamp_(0, high - low)
    else:
        extents.clamp_(low, high).masked_fill_(is_missing, low)
    return bounded


def bounds_of(
    input: Tensor, spatial_scale: float, sampling_ratio: int, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Return the least and the greatest corner of a region, in pixels of the image."""
    side = _larger(input.shape[2], input.shape[3])
    reach: int | torch.SymInt = FURTHEST
    if sampling_ratio <= 0:
        room = _larger(LARGEST_SIDE - side, 2) // 2
        reach = _smaller(_larger(side, LEAST_REACH), room) + 2  # at least one pixel from the map
    most = torch.finfo(dtype).max / 2 / max(spatial_scale, 1)  # so that extents are finite in float16, too
    return -_smaller(reach / spatial_scale, most), _smaller((side + reach) / spatial_scale, most)


# [n, K] each: the two indices next to samples along an axis, the weight of the upper one, and whether a sample counts
Corners = tuple[Tensor, Tensor, Tensor, Tensor]


def _corners(position: Tensor, size: int) -> Corners:
    """Return the corners of samples that are clamped to the map and count if -1 <= position <= size."""
    counts = (position >= -1) & (position <= size)
    position = torch.where(counts, position, 0).clamp(min=0)
    last = size - 1
    low = position.detach().floor().long().clamp(max=last)
    high = (low + 1).clamp(max=last)
    fraction = torch.where(low < last, position - low, 0)
    return low, high, fraction, counts


def _sample(rows: Tensor, first_row: Tensor, y: Tensor, x: Tensor, H: int, W: int) -> Tensor:
    """Return the samples [n, K, C] at y, x [n, K] of the maps from ``first_row`` [n] on in rows [B * H * W, C]."""
    if rows.numel() == 0 or y.numel() == 0:
        return rows.new_zeros(*y.shape, rows.shape[1]) + empty_sum(rows)
    return blended(rows, first_row, _corners(y, H), _corners(x, W), W)


def blended(
    rows: Tensor,  # [R, C]
    first_row: Tensor,  # [n]
    corners_y: Corners,
    corners_x: Corners,
    W: int,
) -> Tensor:  # [n, K, C]
    """Return the sums of four rows each, weighted for bilinear interpolation, or 0 where a sample does not count."""
    y0, y1, fy, y_counts = corners_y
    x0, x1, fx, x_counts = corners_x
    counts = y_counts & x_counts
    total = rows.new_zeros(())
    for row, wy in ((y0, 1 - fy), (y1, fy)):
        for column, wx in ((x0, 1 - fx), (x1, fx)):
            values = rows[first_row[:, None] + row * W + column]
            total = total + (wy * wx)[..., None] * values
    return torch.where(counts[..., None], total, 0)  # A product with 0 would keep NaN.


def _groups(grid: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (samples down, samples across, indices) for each group of regions with the same counts in grid [N, 2]."""
    for count in grid.unique(dim=0):
        yield int(count[0]), int(count[1]), (grid == count).all(1).nonzero().squeeze(1)


def _pool_samples(
    input: Tensor,  # [B, C, H, W]
    origin: Tensor,  # [N, 2, PH, PW] (y, x) of each bin's corner, in pixels
    batch: Tensor,  # [N] int64
    bin_size: Tensor,  # [N, 2]
    grid: Tensor,  # [N, 2] int64: samples down and across a bin
    turns: Tensor,  # [N, 4] (cosine, sine, x, y) of the frames of rotated regions; [N, 0] for upright ones
    takes_maximum: bool,
) -> Tensor:  # [N, C, PH, PW]
    """Return the mean, or the maximum, of the samples of each bin. A bin without samples gives 0."""
    B, C, H, W = input.shape
    N, _, PH, PW = origin.shape
    num_bins = PH * PW
    output = input.new_zeros(N, num_bins, C) + empty_sum(input, origin)
    rows = input.permute(0, 2, 3, 1).reshape(B * H * W, C)
    parts, members_of_parts = [], []
    # What the grid holds is not read where there is nothing to sample.
    groups = _groups(grid) if input.numel() > 0 and output.numel() > 0 else ()
    for down, across, all_members in groups:
        if down <= 0 or across <= 0:
            continue
        per_region = num_bins * down * across * C
        for members in all_members.split(max(CHUNK_VALUES // per_region, 1)):
            count = len(members)
            step = bin_size[members] / bin_size.new_tensor([down, across])  # [n, 2]
            inside_y = (numbers_to(down, rows).to(step) + 0.5) * step[:, :1]  # [n, down]
            inside_x = (numbers_to(across, rows).to(step) + 0.5) * step[:, 1:]  # [n, across]
            corner = origin[members].flatten(2)  # [n, 2, PH * PW]
            pooled: Any = None
            for some_y in inside_y.split(max(CHUNK_VALUES * down // (per_region * count), 1), 1):
                shape = (count, num_bins, some_y.shape[1], across)
                y = (corner[:, 0, :, None, None] + some_y[:, None, :, None]).expand(shape).flatten(1)
                x = (corner[:, 1, :, None, None] + inside_x[:, None, None, :]).expand(shape).flatten(1)
                if turns.shape[1]:
                    cosine, sine, center_x, center_y = turns[members, :, None].unbind(1)
                    x, y = x * cosine + y * sine + center_x, y * cosine - x * sine + center_y
                samples = _sample(rows, batch[members] * (H * W), y, x, H, W)
                samples = samples.view(count, num_bins, -1, C)
                # Without a gradient, which goes to the first of equal samples, no place of the maximum is needed.
                if not takes_maximum:
                    part = samples.sum(2) / (down * across)
                else:
                    part = samples.max(2).values if samples.requires_grad else samples.amax(2)
                pooled = (
                    part if pooled is None else (torch.maximum if takes_maximum else torch.add)(pooled, part)
                )
            parts.append(pooled)
            members_of_parts.append(members)
    if parts:
        output = output.index_copy(0, torch.cat(members_of_parts), torch.cat(parts).to(output))
    return output.transpose(1, 2).reshape(N, C, PH, PW)


pool_samples = recorded_as_one(
    _pool_samples,
    "Tensor input, Tensor origin, Tensor batch, Tensor bin_size, Tensor grid, Tensor turns, "
    "bool takes_maximum",
    leaves=2,
    fake=lambda input, origin, *_: input.new_empty(origin.shape[0], input.shape[1], *origin.shape[2:]),
)


def pool_bins(
    input: Tensor,  # [B, C, H, W]
    batch: Tensor,  # [N]
    start: Tensor,  # [N, 2] (y, x) of the first bin's corner, in pixels
    extent: Tensor,  # [N, 2] (height, width) of the region
    size: tuple[int, int],
    sampling_ratio: int,
    takes_maximum: bool = False,
    movement: Tensor | None = None,  # [N, 2, PH, PW] (y, x) of each bin, in extents of its region
    turns: Tensor | None = None,  # [N, 4], as of ``pool_samples``
) -> Tensor:  # [N, C, PH, PW]
    """Return the mean, or the maximum, of the samples in each bin of regions, in the type of ``input``."""
    bin_size = extent / extent.new_tensor(size)
    y, x = (start[:, i, None] + numbers_to(size[i], start) * bin_size[:, i, None] for i in (0, 1))
    origin = torch.stack([y[:, :, None].expand(-1, *size), x[:, None, :].expand(-1, *size)], 1)
    if movement is not None:
        origin = origin + extent[..., None, None] * movement
    grid = samples_of(bin_size, sampling_ratio)
    turns = bin_size[:, :0] if turns is None else turns
    values = input.to(bin_size)
    return pool_samples(values, origin, batch.long(), bin_size, grid, turns, takes_maximum).to(input)


def samples_of(bin_size: Tensor, sampling_ratio: int) -> Tensor:
    """Return the numbers of samples down and across each bin: the given one, or one for each pixel."""
    return (torch.full_like(bin_size, sampling_ratio) if sampling_ratio > 0 else bin_size.ceil()).long()


def pool_regions(
    input: Tensor,  # [B, C, H, W]
    rois: Tensor,  # [N, 5]
    size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    takes_maximum: bool = False,
    movement: Tensor | None = None,  # [N, 2, PH, PW] (y, x) of each bin, in extents of its region
) -> Tensor:  # [N, C, PH, PW]
    """Return the mean, or the maximum, of the samples in each bin of upright regions."""
    rois = bounded_rois(rois, input, spatial_scale, sampling_ratio, computation_dtype(input))
    boxes = rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    start = boxes[:, :2].flip(1)  # (y, x)
    extent = boxes[:, 2:].flip(1) - start
    extent = extent if aligned else extent.clamp(min=1)
    return pool_bins(input, rois[:, 0], start, extent, size, sampling_ratio, takes_maximum, movement)
