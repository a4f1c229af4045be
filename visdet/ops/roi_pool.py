"""RoIPool, which is the maximum over the whole pixels that each bin of a region touches."""

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import _library, _registration
from ._arguments import constant, empty_sum, is_index, numbers_to, pair
from ._declared import declared
from ._modules import OperatorModule
from ._roi_sampling import MAP, UPRIGHT, check_samples, is_image
from .tracing import gradients_of

__all__ = ["RoIPool", "roi_pool", "roi_pool_reference", "roi_pool_with_argmax"]


def roi_pool(
    input: Tensor,  # [B, C, H, W]
    rois: Tensor,  # [N, 5] (batch index, x1, y1, x2, y2)
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
) -> Tensor:  # [N, C, PH, PW]
    """Return the maximum of each bin: pixels floor(start) to ceil(end) of x1·scale .. (x2 + 1)·scale, cut in bins.

    Args:
        input: [B, C, H, W]. The map, float64, float32, float16 or bfloat16. A NaN pixel counts as -inf.
        rois: [N, 5] (batch index, x1, y1, x2, y2). The regions' batch indices and corners, in pixels of the image. They
            are not differentiated. Corners are not rounded and the far one counts one pixel more, as in mmcv and unlike
            torchvision, which rounds both.
        output_size: (height, width) in bins, or one number for both.
        spatial_scale: The number of pixels of the map per pixel of the image.

    Returns:
        [N, C, PH, PW]. The maxima in the type of ``input``. A bin without pixels gives 0 and has no gradient, and so
        does a region without area, with a batch index that is not one of the whole numbers 0..B-1, or with a corner
        that is NaN or infinite.

    It is differentiable once with respect to ``input``: the gradient goes to the maximum, the first in reading order of
    equal ones. The regions and the position of each maximum are saved for the backward; finding a maximum again would
    cost as much as the forward. It is deterministic, on CUDA the backward under
    ``torch.use_deterministic_algorithms(True)``.

    Raises:
        ValueError: A shape, type, device or number does not fit. The message names the argument.

    Source: Fast R-CNN, arXiv 1504.08083; the bins and the signature are mmcv's.
    """
    return roi_pool_with_argmax(input, rois, output_size, spatial_scale)[0]


@declared(
    "roi_pool",
    input=MAP,
    rois=UPRIGHT,
    output_size="1 or 2 integers, at least 1",
    spatial_scale="number, above 0",
)
def roi_pool_with_argmax(
    input: Tensor, rois: Tensor, output_size: int | tuple[int, int], spatial_scale: float
) -> tuple[Tensor, Tensor]:  # [N, C, PH, PW] in input's type, int32
    """Return ``roi_pool`` and the index into H * W of each bin's maximum, which is -1 for a bin without pixels."""
    size = pair(output_size)
    check_samples("roi_pool", size)
    return _roi_pool(input, constant(rois, input), *size, spatial_scale)


def roi_pool_reference(
    input: Tensor, rois: Tensor, PH: int, PW: int, spatial_scale: float
) -> tuple[Tensor, Tensor]:
    """Return what ``roi_pool_with_argmax`` returns, in plain torch: the definition kernels are tested against."""
    B, C, H, W = input.shape
    begin, end = rois[:, 1:3] * spatial_scale, (rois[:, 3:] + 1) * spatial_scale
    is_region = ((end > begin) & (end - begin).isfinite()).all(1) & is_image(rois[:, 0], B)
    values = input.detach().masked_fill(input.isnan(), -torch.inf)
    argmax = torch.full((len(rois), C, PH, PW), -1, dtype=torch.int64, device=input.device)
    rows, columns = _bins(begin[:, 1], end[:, 1], PH, H), _bins(begin[:, 0], end[:, 0], PW, W)
    for n, p, q in itertools.product(is_region.nonzero()[:, 0].tolist(), range(PH), range(PW)):
        (top, bottom), (left, right) = rows[n][p], columns[n][q]
        if (width := right - left) > 0 and bottom > top:
            first = values[int(rois[n, 0]), :, top:bottom, left:right].flatten(1).argmax(1)
            argmax[n, :, p, q] = (first // width + top) * W + first % width + left
    return _picked(input, rois, argmax), argmax.int()


def _picked(input: Tensor, rois: Tensor, argmax: Tensor) -> Tensor:
    """Return the pixel of each bin's maximum, or 0 where it is none."""
    B, C, H, W = input.shape
    if input.numel() == 0:
        return input.new_zeros(argmax.shape) + empty_sum(input)
    is_of_batch = is_image(rois[:, 0], B)
    image = torch.where(is_of_batch, rois[:, 0], 0).long()[:, None, None, None]
    channel = numbers_to(C, input)[:, None, None]
    pixels = input.flatten(2)[image, channel, argmax.long().clamp(0, H * W - 1)]
    return torch.where(is_index(argmax, H * W) & is_of_batch[:, None, None, None], pixels, 0)


def _bins(start: Tensor, end: Tensor, count: int, size: int) -> list[list[list[int]]]:
    """Return the first pixel and the one behind the last of each bin of the intervals start..end [N]."""
    edges = numbers_to(count + 1, start) * ((end - start) / count)[:, None] + start[:, None]
    ends = torch.stack([edges[:, :-1].floor(), edges[:, 1:].ceil()], 2)
    return ends.nan_to_num().clamp(0, size).long().tolist()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, rois = inputs[:2]
    ctx.save_for_backward(rois, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for argmax
    ctx.sizes, ctx.dtype = (input.shape[0], *input.shape[2:]), input.dtype


def _backward(ctx: Any, grad_output: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 5
    rois, argmax = ctx.saved_tensors
    grad = roi_pool_gradient(grad_output, rois, argmax, ctx.sizes)
    return grad.to(ctx.dtype), None, None, None, None


def roi_pool_gradient(
    grad_output: Tensor, rois: Tensor, argmax: Tensor, sizes: tuple[int, int, int]
) -> Tensor:
    """Return the gradient of the input [B, C, H, W], with sizes (B, H, W), in the type of ``rois``."""
    if _library.serves(grad_output) and not _registration.needs_order(grad_output):
        return torch.ops.visdet.roi_pool_backward.default(grad_output, rois, argmax, *sizes)
    # torch's ordered accumulation is slower than atomic additions.
    B, H, W = sizes
    input = rois.new_zeros(()).expand(B, grad_output.shape[1], H, W)
    gradient, *_ = gradients_of(_picked, grad_output.to(rois), (input, rois, argmax), (True, False, False))
    assert gradient is not None
    return gradient


_roi_pool = _registration.differentiable(
    "roi_pool",
    "input [N, C, pooled_height, pooled_width], input [N, C, pooled_height, pooled_width] int32",
    layouts={"input": "[B, C, H, W]", "rois": "[N, 5]"},
    gradient=SimpleNamespace(
        fake=lambda grad_output, rois, argmax, B, H, W: rois.new_empty(B, grad_output.shape[1], H, W),
        save=_setup_context,
        backward=_backward,
    ),
    elsewhere=roi_pool_reference,
    needs_library=False,
)


class RoIPool(OperatorModule):
    """A module that calls ``roi_pool`` with its settings."""

    operator = staticmethod(roi_pool)

    def __init__(self, output_size: int | tuple[int, int], spatial_scale: float = 1.0) -> None:
        super().__init__(output_size=pair(output_size), spatial_scale=float(spatial_scale))

    def forward(self, input: Tensor, rois: Tensor) -> Tensor:
        return self._call(input, rois)
