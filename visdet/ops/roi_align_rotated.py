"""RoIAlign of rotated regions, which is the mean of bilinear samples in each bin of a rotated region."""

import torch
from torch import Tensor

from . import _library
from ._arguments import computation_dtype, pair
from ._declared import declared
from ._modules import OperatorModule
from ._renamed import renamed_arguments
from ._roi_sampling import MAP, ROTATED, bounded_rois, check_samples, pool_bins
from .box_iou_rotated import turned_back
from .roi_align import pool_by_kernels

__all__ = ["RoIAlignRotated", "roi_align_rotated", "roi_align_rotated_reference"]


@declared(
    input=MAP,
    rois=ROTATED,
    output_size="1 or 2 integers, at least 1",
    spatial_scale="number, above 0",
    sampling_ratio="integer",
)
def roi_align_rotated(
    input: Tensor,  # [B, C, H, W]
    rois: Tensor,  # [N, 6] (batch index, x, y, w, h, angle)
    output_size: int | tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int = 0,
    aligned: bool = True,
    clockwise: bool = False,
) -> Tensor:  # [N, C, PH, PW]
    """Return each rotated region's bins, averaged over bilinear samples.

    Args:
        input: [B, C, H, W]. The map, of any floating-point type.
        rois: [N, 6] (batch index, x, y, w, h, angle). The regions' batch indices, centres and sides, in pixels of the
            image, and their angles in radians. They are not differentiated. A negative side counts as 0.
        output_size: (height, width) in bins, or one number for both.
        spatial_scale: The number of pixels of the map per pixel of the image.
        sampling_ratio: As of ``roi_align``.
        aligned: As of ``roi_align``.
        clockwise: Whether angles turn from the x axis towards the y axis, which is clockwise in an image, whose y axis
            points down.

    Returns:
        [N, C, PH, PW]. The bins in the type of ``input``. Samples are those that ``roi_align`` takes of the region
        before it is rotated about its centre, and have its border rule. No regions give [0, C, PH, PW].

    A region whose batch index is not one of the whole numbers 0..B-1, or with NaN among its numbers or an infinite
    angle, gives 0 and has no gradient. Centres are bounded as corners of ``roi_align`` are, and a side is at most as
    long as these bounds are apart.

    It is differentiable once with respect to ``input``. It is computed by the kernels of ``roi_align``, with the same
    types, sums and determinism. Plain torch serves other devices.

    Raises:
        ValueError: A shape, type, device or number does not fit. The message names the argument.

    Source: arXiv 1703.01086 (rotated regions) and 1703.06870 (RoIAlign); the signature is mmcv's.
    """
    size = pair(output_size)
    check_samples("roi_align_rotated", size, sampling_ratio)
    if _library.serves(input):
        rois = turned_back(rois) if clockwise else rois
        return pool_by_kernels(input, rois, size, spatial_scale, sampling_ratio, aligned)
    return roi_align_rotated_reference(input, rois, size, spatial_scale, sampling_ratio, aligned, clockwise)


def roi_align_rotated_reference(
    input: Tensor,
    rois: Tensor,
    output_size: int | tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int = 0,
    aligned: bool = True,
    clockwise: bool = False,
) -> Tensor:
    """Return what ``roi_align_rotated`` returns, in plain torch: the definition kernels are tested against."""
    rois = turned_back(rois) if clockwise else rois
    rois = bounded_rois(rois, input, spatial_scale, sampling_ratio, computation_dtype(input))
    center = rois[:, 1:3] * spatial_scale - (0.5 if aligned else 0.0)
    extent = rois[:, 3:5].flip(1) * spatial_scale  # (h, w)
    extent = extent if aligned else extent.clamp(min=1)
    angle = rois[:, 5:]
    turns = torch.cat([angle.cos(), angle.sin(), center], 1)
    size = pair(output_size)
    return pool_bins(input, rois[:, 0], -extent / 2, extent, size, sampling_ratio, turns=turns)


class RoIAlignRotated(OperatorModule):
    """A module that calls ``roi_align_rotated`` with its settings."""

    operator = staticmethod(roi_align_rotated)

    @renamed_arguments(out_size="output_size", sample_num="sampling_ratio")
    def __init__(
        self,
        output_size: int | tuple[int, int],
        spatial_scale: float,
        sampling_ratio: int = 0,
        aligned: bool = True,
        clockwise: bool = False,
    ) -> None:
        super().__init__(
            output_size=pair(output_size),
            spatial_scale=float(spatial_scale),
            sampling_ratio=int(sampling_ratio),
            aligned=aligned,
            clockwise=clockwise,
        )

    def forward(self, input: Tensor, rois: Tensor) -> Tensor:
        return self._call(input, rois)
