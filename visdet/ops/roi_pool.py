"""RoIPool: the maximum over the whole pixels that each bin of a region touches."""

import torch
from torch import Tensor, nn

from ._roi_sampling import check_rois, pair

__all__ = ["RoIPool", "roi_pool", "roi_pool_argmax"]


def _bins(start: Tensor, end: Tensor, count: int, size: int) -> Tensor:
    """Return [N, count, size] bool: the pixels of each bin of the intervals start..end [N]."""
    steps = torch.arange(count + 1, device=start.device).to(start)
    width = (end - start) / count
    first = (steps[:-1] * width[:, None] + start[:, None]).floor()
    last = (steps[1:] * width[:, None] + start[:, None]).ceil()
    pixel = torch.arange(size, device=start.device)
    return (pixel >= first[..., None]) & (pixel < last[..., None])


def roi_pool_argmax(
    input: Tensor, rois: Tensor, output_size: tuple[int, int], spatial_scale: float
) -> Tensor:  # [N, C, PH, PW] int64
    """Return the index into H * W of each bin's maximum, the first of equal ones; -1 for a bin without pixels."""
    _, C, H, W = input.shape
    PH, PW = output_size
    N = len(rois)
    argmax = torch.full((N, C, PH, PW), -1, dtype=torch.int64, device=input.device)
    if N == 0 or input.numel() == 0:
        return argmax
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    boxes = rois[:, 1:].detach().to(dtype)
    x1, y1 = boxes[:, 0] * spatial_scale, boxes[:, 1] * spatial_scale
    x2, y2 = (boxes[:, 2] + 1) * spatial_scale, (boxes[:, 3] + 1) * spatial_scale
    is_region = ((x2 > x1) & (y2 > y1))[:, None, None]
    in_row = _bins(y1, y2, PH, H) & is_region  # [N, PH, H]
    in_column = _bins(x1, x2, PW, W) & is_region  # [N, PW, W]
    lowest = -float("inf")
    row_of, column_of = torch.arange(H, device=input.device), torch.arange(W, device=input.device)
    values = input.detach().to(dtype).nan_to_num(nan=lowest, posinf=float("inf"), neginf=lowest)
    for n in range(N):  # first down the columns, then along the rows of what is left
        map_of_region = values[rois[n, 0].long()]  # [C, H, W]
        for p in range(PH):
            rows = row_of[in_row[n, p]]
            if len(rows) == 0:
                continue
            best, best_row = map_of_region[:, rows[0] : rows[-1] + 1].max(1)  # [C, W]
            inside = best[:, None].masked_fill(~in_column[n][None], lowest)  # [C, PW, W]
            peak = inside.amax(-1)
            index = (best_row + rows[0])[:, None] * W + column_of  # [C, 1, W]
            first = index.masked_fill((inside != peak[..., None]) | ~in_column[n], H * W).amin(-1)
            argmax[n, :, p] = torch.where(in_column[n].any(-1), first, -1)
    return argmax


def roi_pool(
    input: Tensor,  # [B, C, H, W]
    rois: Tensor,  # [N, 5] (batch index, x1, y1, x2, y2)
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
) -> Tensor:  # [N, C, PH, PW]
    """Return the maximum of each bin: pixels floor(start) to ceil(end) of x1·scale .. (x2 + 1)·scale, cut in bins.

    Corners are not rounded and the far one counts one pixel more, as in mmcv and unlike torchvision, which rounds
    both. A bin without pixels, and a region without area, gives 0. Differentiable with respect to ``input``: the
    gradient goes to the maximum, the first in reading order of equal ones. Plain torch, any floating type.

    Raises:
        ValueError: a shape or device does not fit.

    Source: Fast R-CNN; bins and signature are mmcv's.
    """
    check_rois("roi_pool", input, rois)
    size = pair(output_size)
    argmax = roi_pool_argmax(input, rois, size, spatial_scale)
    if argmax.numel() == 0 or input.numel() == 0:
        return input.new_zeros(argmax.shape) + 0 * input.sum()
    C, pixels = input.shape[1], input.shape[2] * input.shape[3]
    first = (
        rois[:, 0].long()[:, None] * C + torch.arange(C, device=input.device)
    ) * pixels  # of each map, [N, C]
    pooled = input.flatten()[first[..., None, None] + argmax.clamp(min=0)]
    return torch.where(argmax >= 0, pooled, 0)


class RoIPool(nn.Module):
    """``roi_pool`` with its settings."""

    def __init__(self, output_size: int | tuple[int, int], spatial_scale: float = 1.0) -> None:
        super().__init__()
        self.output_size = pair(output_size)
        self.spatial_scale = float(spatial_scale)

    def forward(self, input: Tensor, rois: Tensor) -> Tensor:
        return roi_pool(input, rois, self.output_size, self.spatial_scale)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}, spatial_scale={self.spatial_scale}"
