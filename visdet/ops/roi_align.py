"""RoIAlign, which is the mean or the maximum of bilinear samples in each bin of a region."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import _library, _registration
from ._arguments import constant, pair
from ._declared import declared
from ._modules import OperatorModule
from ._renamed import renamed_arguments
from ._roi_sampling import MAP, UPRIGHT, check_samples, empty_maps, pool_regions

__all__ = ["RoIAlign", "roi_align", "roi_align_reference"]


@declared(
    input=MAP,
    rois=UPRIGHT,
    output_size="1 or 2 integers, at least 1",
    spatial_scale="number, above 0",
    sampling_ratio="integer",
    pool_mode="one of 'avg', 'max'",
)
def roi_align(
    input: Tensor,  # [B, C, H, W]
    rois: Tensor,  # [N, 5] (batch index, x1, y1, x2, y2)
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    pool_mode: str = "avg",
    aligned: bool = True,
) -> Tensor:  # [N, C, PH, PW]
    """Return each region's bins, pooled over bilinear samples.

    Args:
        input: [B, C, H, W]. The map, of any floating-point type.
        rois: [N, 5] (batch index, x1, y1, x2, y2). The regions' batch indices and corners, in pixels of the image. They
            are not differentiated.
        output_size: (height, width) in bins, or one number for both.
        spatial_scale: The number of pixels of the map per pixel of the image.
        sampling_ratio: The number of samples down and across each bin; 0 for as many as the bin covers pixels,
            rounded up.
        pool_mode: 'avg' for the mean of a bin's samples, 'max' for their maximum.
        aligned: Whether regions are moved by half a pixel, so that pixel centres are at .5 of the map. False is the
            first version, which also makes regions at least one pixel wide.

    Returns:
        [N, C, PH, PW]. The bins in the type of ``input``. A sample beyond one pixel outside the map is 0; others are
        clamped to it. No regions give [0, C, PH, PW].

    A region whose batch index is not one of the whole numbers 0..B-1, or with NaN among its numbers, gives 0 and has no
    gradient, on every device and without synchronising one. With ``sampling_ratio=0``, where the number of samples
    grows with the region, a region is cut where it ends further outside the map than the map's longer side (at least
    128 pixels). With a given ``sampling_ratio`` it is cut 2^24 pixels outside. Infinite corners are cut likewise.

    It is differentiable once with respect to ``input``. Kernels of visdet's serve 'avg' for all four value types, with
    sums in float32 (float64 for float64). On the CPU the results have the same bits for any number of threads. On CUDA
    the forward is deterministic, and the gradient is under ``torch.use_deterministic_algorithms(True)``: it is then
    added up in whole numbers, multiples of about 2^-40 of the largest element of the output's gradient. The output may
    have more than 2^31 numbers. Plain torch serves 'max' on CUDA, and all where visdet's library is missing.

    Raises:
        ValueError: A shape, type, device, number or ``pool_mode`` does not fit. The message names the argument.

    Source: Mask R-CNN, arXiv 1703.06870; the signature and the defaults are mmcv's (torchvision's default is
    aligned=False).
    """
    size = pair(output_size)
    check_samples("roi_align", size, sampling_ratio)
    takes_maximum = pool_mode == "max"
    if input.numel() == 0 or not _library.serves(input) or (takes_maximum and input.is_cuda):
        return roi_align_reference(input, rois, size, spatial_scale, sampling_ratio, pool_mode, aligned)
    return pool_by_kernels(input, rois, size, spatial_scale, sampling_ratio, aligned, takes_maximum)


def pool_by_kernels(
    input: Tensor,
    rois: Tensor,  # [N, 5], or [N, 6] for rotated regions
    size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    takes_maximum: bool = False,
) -> Tensor:
    """Return what visdet's kernels compute. Those of maxima are for the CPU and upright regions."""
    rois = constant(rois, input)
    pool = _roi_align_max if takes_maximum else _roi_align
    return pool(input, rois, *size, spatial_scale, sampling_ratio, aligned)


def roi_align_reference(
    input: Tensor,
    rois: Tensor,
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    pool_mode: str = "avg",
    aligned: bool = True,
) -> Tensor:
    """Return what ``roi_align`` returns, in plain torch, in both modes: the definition kernels are tested against."""
    size, takes_maximum = pair(output_size), pool_mode == "max"
    return pool_regions(input, rois, size, spatial_scale, sampling_ratio, aligned, takes_maximum)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, rois, _, _, *settings = inputs
    ctx.save_for_backward(rois)
    ctx.sizes, ctx.settings = (input.shape[0], *input.shape[2:]), settings


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    is_ordered = torch.are_deterministic_algorithms_enabled()
    grad = torch.ops.visdet.roi_align_backward.default(
        grad_output, *ctx.saved_tensors, *ctx.sizes, *ctx.settings, is_ordered
    )
    return grad, None, None, None, None, None, None


_POOLED = "input [N, C, pooled_height, pooled_width]"
_LAYOUTS = {"input": "[B, C, H, W]", "rois": "[N, 5]"}
_roi_align_max = _registration.differentiable("roi_align_max", _POOLED, layouts=_LAYOUTS)
_roi_align = _registration.differentiable(
    "roi_align",
    _POOLED,
    layouts=_LAYOUTS,
    gradient=SimpleNamespace(
        fake=empty_maps,
        save=_setup_context,
        backward=_backward,
    ),
)


class RoIAlign(OperatorModule):
    """A module that calls ``roi_align`` with its settings. ``use_torchvision`` is accepted and ignored."""

    operator = staticmethod(roi_align)

    @renamed_arguments(out_size="output_size", sample_num="sampling_ratio")
    def __init__(
        self,
        output_size: int | tuple[int, int],
        spatial_scale: float = 1.0,
        sampling_ratio: int = 0,
        pool_mode: str = "avg",
        aligned: bool = True,
        use_torchvision: bool = False,
    ) -> None:
        super().__init__(
            output_size=pair(output_size),
            spatial_scale=float(spatial_scale),
            sampling_ratio=int(sampling_ratio),
            pool_mode=pool_mode,
            aligned=aligned,
        )
        self.use_torchvision = use_torchvision

    def forward(self, input: Tensor, rois: Tensor) -> Tensor:
        return self._call(input, rois)
