"""RoIPool: the maximum over the whole pixels that each bin of a region touches."""

from typing import Any

import torch
from torch import Tensor, nn

from . import _library
from ._roi_sampling import check_rois, pair

__all__ = ["RoIPool", "roi_pool", "roi_pool_reference", "roi_pool_with_argmax"]


def roi_pool(
    input: Tensor,  # [B, C, H, W]
    rois: Tensor,  # [N, 5] (batch index, x1, y1, x2, y2)
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
) -> Tensor:  # [N, C, PH, PW]
    """Return the maximum of each bin: pixels floor(start) to ceil(end) of x1·scale .. (x2 + 1)·scale, cut in bins.

    Corners are not rounded and the far one counts one pixel more, as in mmcv and unlike torchvision, which rounds
    both. A bin without pixels, and a region without area or of no image of the batch, gives 0; NaN counts as -inf.
    Differentiable once with respect to ``input``: the gradient goes to the maximum, the first in reading order of
    equal ones. Saved for the backward are the regions and the place of each maximum, which costs as much to find
    again as the forward. Deterministic; on CUDA the backward under ``torch.use_deterministic_algorithms(True)``.

    Raises:
        ValueError: a shape or device does not fit.

    Source: Fast R-CNN; bins and signature are mmcv's.
    """
    return roi_pool_with_argmax(input, rois, pair(output_size), spatial_scale)[0]


def roi_pool_with_argmax(
    input: Tensor, rois: Tensor, output_size: tuple[int, int], spatial_scale: float
) -> tuple[Tensor, Tensor]:  # [N, C, PH, PW] in input's type, int32
    """Return ``roi_pool`` and the index into H * W of each bin's maximum; -1 for a bin without pixels."""
    check_rois("roi_pool", input, rois)
    rois = rois.detach().to(torch.float64 if input.dtype == torch.float64 else torch.float32)
    is_served = _library.is_loaded("cpu") and input.device.type in ("cpu", "cuda", "meta")
    run = torch.ops.visdet.roi_pool if is_served else roi_pool_reference
    return run(input, rois, *output_size, float(spatial_scale))


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


def _bins(start: Tensor, end: Tensor, count: int, size: int) -> Tensor:
    """Return [N, count, size] bool: the pixels of each bin of the intervals start..end [N]."""
    steps = torch.arange(count + 1, device=start.device).to(start)
    width = (end - start) / count
    first = (steps[:-1] * width[:, None] + start[:, None]).floor()
    last = (steps[1:] * width[:, None] + start[:, None]).ceil()
    pixel = torch.arange(size, device=start.device)
    return (pixel >= first[..., None]) & (pixel < last[..., None])


def roi_pool_reference(
    input: Tensor, rois: Tensor, PH: int, PW: int, spatial_scale: float
) -> tuple[Tensor, Tensor]:
    """Return what ``roi_pool_with_argmax`` returns, in plain torch: the definition kernels are tested against."""
    B, C, H, W = input.shape
    x1, y1 = rois[:, 1] * spatial_scale, rois[:, 2] * spatial_scale
    x2, y2 = (rois[:, 3] + 1) * spatial_scale, (rois[:, 4] + 1) * spatial_scale
    is_region = (x2 > x1) & (y2 > y1) & (rois[:, 0] >= 0) & (rois[:, 0] < B)
    in_row = _bins(y1, y2, PH, H) & is_region[:, None, None]  # [N, PH, H]
    in_column = _bins(x1, x2, PW, W) & is_region[:, None, None]  # [N, PW, W]
    image = torch.where(is_region, rois[:, 0], 0).long()
    lowest = -float("inf")
    values = input.detach().to(rois.dtype).nan_to_num(nan=lowest, posinf=float("inf"), neginf=lowest)
    outputs, places = [input.new_zeros(0, C, PH, PW)], [image.new_zeros(0, C, PH, PW)]
    for n in range(len(rois) if B else 0):
        inside = in_row[n, :, None, :, None] & in_column[n, None, :, None, :]  # [PH, PW, H, W]
        bins = values[image[n], :, None, None].masked_fill(~inside, lowest).flatten(3)  # [C, PH, PW, H * W]
        is_peak = (bins == bins.amax(-1, keepdim=True)) & inside.flatten(2)
        place = torch.where(is_peak.any(-1), is_peak.long().argmax(-1), -1)  # the first of equal ones
        pooled = input[image[n]].flatten(1).gather(1, place.clamp(min=0).flatten(1)).view(place.shape)
        outputs.append(torch.where(place >= 0, pooled, 0)[None])
        places.append(place[None])
    return torch.cat(outputs), torch.cat(places).int()


def _fake(
    input: Tensor, rois: Tensor, pooled_height: int, pooled_width: int, spatial_scale: float
) -> tuple[Tensor, Tensor]:
    shape = (rois.shape[0], input.shape[1], pooled_height, pooled_width)
    return input.new_empty(shape), input.new_empty(shape, dtype=torch.int32)


def _fake_backward(grad_output: Tensor, rois: Tensor, argmax: Tensor, B: int, H: int, W: int) -> Tensor:
    return rois.new_empty(B, grad_output.shape[1], H, W)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, rois = inputs[:2]
    ctx.save_for_backward(rois, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for argmax
    ctx.sizes, ctx.dtype = (input.shape[0], *input.shape[2:]), input.dtype


def _backward(ctx: Any, grad_output: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    rois, argmax = ctx.saved_tensors
    if grad_output.is_cuda and torch.are_deterministic_algorithms_enabled():
        grad = _ordered_backward(grad_output.to(rois.dtype), rois, argmax, *ctx.sizes)
    else:
        grad = torch.ops.visdet.roi_pool_backward(grad_output, rois, argmax, *ctx.sizes)
    return grad.to(ctx.dtype), None, None, None, None


def _ordered_backward(grad_output: Tensor, rois: Tensor, argmax: Tensor, B: int, H: int, W: int) -> Tensor:
    """Return the gradient of the input by torch's ordered accumulation: slower than atomic additions."""
    C = grad_output.shape[1]
    first = rois[:, :1].clamp(0, max(B - 1, 0)).long() * C + torch.arange(C, device=rois.device)  # [N, C]
    index = first[..., None, None] * (H * W) + argmax.clamp(min=0)
    grad = rois.new_zeros(B * C * H * W)
    if grad.numel() == 0:
        return grad.view(B, C, H, W)
    counted = torch.where(argmax >= 0, grad_output, 0)
    return grad.index_put_((index.flatten(),), counted.flatten(), accumulate=True).view(B, C, H, W)


if _library.is_loaded("cpu"):
    torch.library.register_fake("visdet::roi_pool", _fake)
    torch.library.register_fake("visdet::roi_pool_backward", _fake_backward)
    torch.library.register_autograd("visdet::roi_pool", _backward, setup_context=_setup_context)
    _library.explain_missing_cuda("roi_pool", "roi_pool_backward")
