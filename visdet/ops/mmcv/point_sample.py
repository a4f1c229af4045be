"""Bilinear samples at points given relative to a map or to regions, as PointRend and Mask2Former use them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._arguments import check_that, empty_sum, pair, widened
from .._declared import declared
from .._roi_sampling import MAP, UPRIGHT
from ..tracing import is_traced, recorded_as_one

__all__ = [
    "SimpleRoIAlign",
    "abs_img_point_to_rel_img_point",
    "bilinear_grid_sample",
    "denormalize",
    "generate_grid",
    "normalize",
    "point_sample",
    "rel_roi_point_to_abs_img_point",
    "rel_roi_point_to_rel_img_point",
]


# Points are clamped to this coordinate, which is far outside every map. float16 can represent it, too.
_FURTHEST = 16384.0


def _needs_float32(im: Tensor) -> bool:
    """Return whether ``im`` must be converted to float32 for torch's kernel.

    Its CPU kernels of 16-bit types count pixels in 16 bits. From 2^15 numbers on, they read wrong pixels or other
    memory.
    """
    return im.device.type == "cpu" and im.dtype in (torch.float16, torch.bfloat16)


def _grid_sample(
    op: str,
    im: Tensor,
    grid: Tensor,
    align_corners: bool,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
) -> Tensor:
    """Return ``grid_sample`` after making all coordinates finite. At others, torch's CPU kernel reads stray memory."""
    if im.dim() == 4 and 0 in im.shape[2:]:
        may_be_empty = padding_mode == "zeros"
        expected = "have pixels where padding_mode is {!r}"
        check_that(may_be_empty, op, "input", expected, im, padding_mode)
        im = F.pad(im, (0, 1, 0, 1))  # torch refuses maps without pixels
    dtype, is_widened = im.dtype, _needs_float32(im)
    if is_widened:
        im, grid = im.float(), grid.float()
    grid = grid.nan_to_num(nan=-_FURTHEST).clamp(-_FURTHEST, _FURTHEST)
    is_plain = mode == "bilinear" and padding_mode == "zeros"
    may_use_cudnn = align_corners and is_plain and im.dim() == grid.dim() == 4
    if may_use_cudnn and torch.are_deterministic_algorithms_enabled():
        # cuDNN's gradients differ from run to run without an error. torch's own kernel raises an error.
        common = torch.promote_types(im.dtype, grid.dtype)
        samples = torch.grid_sampler_2d(im.to(common), grid.to(common), 0, 0, True)
    else:
        samples = F.grid_sample(im, grid, mode, padding_mode, align_corners)
    return samples.to(dtype) if is_widened else samples


@declared(im="floating", grid="floating")
def bilinear_grid_sample(im: Tensor, grid: Tensor, align_corners: bool = False) -> Tensor:
    """Return ``grid_sample``, bilinear and with zeros, of im [B, C, H, W] at grid [B, Hg, Wg, 2], [B, C, Hg, Wg].

    Args:
        im: The map. float16 and bfloat16 are computed in float32 on the CPU.
        grid: Points (x, y) in -1..1. A point with a NaN or infinite coordinate is outside, and so is any point of a map
            without pixels. Such a point gives 0 and has no gradient.
        align_corners: Whether -1 and 1 are the centres of the outer pixels instead of their outer edges.

    It is differentiable with respect to ``im`` and ``grid``.

    Source: The signature is mmcv's.
    """
    return _grid_sample("bilinear_grid_sample", im, grid, align_corners)


@declared(grid="real")
def normalize(grid: Tensor) -> Tensor:
    """Return coordinates in -1..1 as coordinates in 0..1."""
    return (grid + 1.0) / 2.0


@declared(grid="real")
def denormalize(grid: Tensor) -> Tensor:
    """Return coordinates in 0..1 as coordinates in -1..1."""
    return grid * 2.0 - 1.0


@declared(num_grid="integer, at least 0", size="2 integers, at least 0")
def generate_grid(num_grid: int, size: tuple[int, int], device: torch.device | str) -> Tensor:
    """Return the centres (x, y) in 0..1 of cells, row by row, [num_grid, height * width, 2].

    Args:
        num_grid: The number of equal grids.
        size: (height, width) in cells.
        device: The device of the result.
    """
    height, width = size
    y = (torch.arange(height, device=device) + 0.5) / height
    x = (torch.arange(width, device=device) + 0.5) / width
    return torch.cartesian_prod(y, x).flip(1).expand(num_grid, -1, -1)


@declared(rois="real [N, D]", rel_roi_points="real [N, P, 2]")
@torch.no_grad()
def rel_roi_point_to_abs_img_point(rois: Tensor, rel_roi_points: Tensor) -> Tensor:
    """Return points [N, P, 2] in 0..1 of their regions as points (x, y) in pixels, without gradient.

    Args:
        rois: The regions (x1, y1, x2, y2) in pixels, [N, 4], or [N, 5] with the batch index first.
        rel_roi_points: The points of each region, (x, y).

    Raises:
        ValueError: A shape does not fit.
    """
    has_corners = rois.shape[1] in (4, 5)
    check_that(has_corners, "rel_roi_point_to_abs_img_point", "rois", "be [N, 4] or [N, 5]", rois)
    low, high = rois[:, None, -4:].split(2, -1)
    return rel_roi_points * (high - low) + low


@declared(abs_img_points="real", spatial_scale="number")
def abs_img_point_to_rel_img_point(
    abs_img_points: Tensor, img: tuple[int, int] | Tensor, spatial_scale: float = 1.0
) -> Tensor:
    """Return points [N, P, 2] in pixels (x, y) as points in 0..1 of ``img``.

    Args:
        abs_img_points: The points in pixels of the image.
        img: (height, width) in pixels, or a map [B, C, H, W].
        spatial_scale: The number of pixels of ``img`` per pixel of the points.
    """
    height, width = img.shape[2:] if isinstance(img, Tensor) else img
    return abs_img_points / abs_img_points.new_tensor([width, height], dtype=torch.float32) * spatial_scale


@declared(rois="real", rel_roi_points="real", spatial_scale="number")
def rel_roi_point_to_rel_img_point(
    rois: Tensor, rel_roi_points: Tensor, img: tuple[int, int] | Tensor, spatial_scale: float = 1.0
) -> Tensor:
    """Return points [N, P, 2] in 0..1 of their regions as points in 0..1 of ``img``, without gradient.

    Args:
        rois: The regions, as ``rel_roi_point_to_abs_img_point`` takes them.
        rel_roi_points: The points of each region, (x, y).
        img: (height, width) in pixels, or a map [B, C, H, W].
        spatial_scale: The number of pixels of ``img`` per pixel of the regions.

    Raises:
        ValueError: A shape does not fit.
    """
    return abs_img_point_to_rel_img_point(
        rel_roi_point_to_abs_img_point(rois, rel_roi_points), img, spatial_scale
    )


@declared(input="floating", points="floating")
def point_sample(input: Tensor, points: Tensor, align_corners: bool = False, **kwargs: Any) -> Tensor:
    """Return bilinear samples of input [B, C, H, W] at points (x, y) in 0..1.

    Args:
        input: The map. float16 and bfloat16 are computed in float32 on the CPU.
        points: [B, P, 2], which give [B, C, P], or [B, Hg, Wg, 2], which give [B, C, Hg, Wg].
        align_corners: Whether 0 and 1 are the centres of the outer pixels instead of their outer edges.
        kwargs: Further arguments of ``grid_sample``.

    A NaN coordinate counts as one far to the left or above, and an infinite or huge one as one far outside on its side.
    Such a point is 0 with the zeros that ``padding_mode`` pads by default, and on the border with 'border'; the point
    gets no gradient. Every point is outside of a map without pixels.

    It is differentiable with respect to ``input`` and ``points``.

    Raises:
        ValueError: ``points`` do not fit ``input``, or ``input`` has no pixels and ``padding_mode`` is not 'zeros'.

    Source: PointRend, arXiv 1912.08193; the signature is mmcv's.
    """
    dims = points.dim()
    fits = dims in (3, 4) and points.shape[-1] == 2 and (is_traced() or len(points) == len(input))
    expected = "be [B, P, 2] or [B, Hg, Wg, 2] for input {}"
    check_that(input.dim() != 4 or fits, "point_sample", "points", expected, points, list(input.shape))
    points = points.float() if _needs_float32(input) else points
    grid = denormalize(points[:, :, None] if dims == 3 else points)
    samples = _grid_sample("point_sample", input, grid, align_corners, **kwargs)
    return samples.squeeze(3) if dims == 3 else samples


def _sample_regions(
    features: Tensor,  # [B, C, H, W]
    points: Tensor,  # [N, P, 2] (x, y) in 0..1
    batch: Tensor,  # [N]
    align_corners: bool,
) -> Tensor:  # [N, C, P]
    """Return samples of the image that each region belongs to. A region of no image gives 0."""
    output = features.new_zeros(len(points), features.shape[1], points.shape[1]) + empty_sum(features)
    for image in range(len(features)):
        members = (batch == image).nonzero().squeeze(1)
        if len(members):
            sampled = point_sample(
                features[image : image + 1], points[members][None], align_corners=align_corners
            )
            output = output.index_copy(0, members, sampled[0].transpose(0, 1))
    return output


_samples_of_regions = recorded_as_one(
    _sample_regions,
    "Tensor features, Tensor points, Tensor batch, bool align_corners",
    leaves=1,
    fake=lambda features, points, *_: features.new_empty(points.shape[0], features.shape[1], points.shape[1]),
)


class SimpleRoIAlign(nn.Module):
    """Takes one sample at the centre of each bin, as PointRend's cheap RoIAlign does.

    The regions keep their order, whereas mmcv sorts them by image. ``aligned=False`` samples with align_corners=True. A
    region of no image of the batch gives 0, and so does a point that is no number. float16 and bfloat16 are computed in
    float32. It raises a ValueError unless
    ``features`` are [B, C, H, W] and ``rois`` [N, 5].
    """

    def __init__(
        self, output_size: int | tuple[int, int], spatial_scale: float, aligned: bool = True
    ) -> None:
        super().__init__()
        self.output_size = pair(output_size)
        self.spatial_scale = float(spatial_scale)
        self.aligned = aligned

    @declared("SimpleRoIAlign", features=MAP, rois=UPRIGHT)
    def forward(self, features: Tensor, rois: Tensor) -> Tensor:
        given = features
        features = widened(features, features)  # 16 bits do not hold a position in a map
        cells = generate_grid(rois.shape[0], self.output_size, rois.device)
        points = rel_roi_point_to_rel_img_point(rois, cells, features, self.spatial_scale).to(features)
        output = _samples_of_regions(features, points, rois[:, 0], not self.aligned)
        output = output.view(*output.shape[:2], *self.output_size)
        return output.to(given)

    def extra_repr(self) -> str:
        return f"output_size={self.output_size}, spatial_scale={self.spatial_scale}"
