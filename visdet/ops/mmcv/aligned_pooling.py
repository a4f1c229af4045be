"""Pooling at the borders of boxes, along Bezier curves, and by the integral of the map (PrRoIPool)."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import _library, _registration
from .._arguments import computation_dtype, constant, empty_sum, numbers_to, widened
from .._declared import declared
from .._roi_sampling import (
    MAP,
    UPRIGHT,
    _sample,
    bounds_of,
    check_samples,
    empty_maps,
    is_image,
    pool_samples,
    samples_of,
)

__all__ = ["bezier_align", "border_align", "border_samples", "prroi_pool"]


@declared(
    "border_align",
    input="floating [B, 4 * C, H, W]",
    boxes="real [B, N, 4]",
    pool_size="integer, at least 1, at most 4096",
    argmax="None or integers",
)
def border_samples(
    input: Tensor,  # [B, 4 * C, H, W]
    boxes: Tensor,  # [B, N, 4]
    pool_size: int,
    argmax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # [B, C, N, 4], [B, C, N, 4] int32
    """Return the largest sample on each border and its place 0..pool_size, or the samples at given places."""
    B, channels, H, W = input.shape
    C, N = channels // 4, boxes.shape[1]
    rows = input.view(B, 4, C, H, W).permute(0, 1, 3, 4, 2).reshape(B * 4 * H * W, C)
    rows = widened(rows, input)
    x1, y1, x2, y2 = constant(boxes, input).unbind(2)
    # [B, 4, N] of the first samples of the borders at the top, at the left, at the bottom and at the right, and steps.
    x, y = torch.stack([x1, x1, x2, x2], 1), torch.stack([y1, y1, y2, y2], 1)
    step_x = (torch.stack([x2, x1, x1, x2], 1) - x) / pool_size
    step_y = (torch.stack([y1, y2, y2, y1], 1) - y) / pool_size
    first_row = numbers_to(4 * B, input) * (H * W)
    pooled = place = rows.new_zeros(())
    for i in range(pool_size + 1):
        at_y, at_x = (y + i * step_y).flatten(0, 1), (x + i * step_x).flatten(0, 1)
        sample = _sample(rows, first_row, at_y, at_x, H, W).view(B, 4, N, C).permute(0, 3, 2, 1)
        if argmax is not None:
            pooled = pooled + torch.where(argmax == i, sample, 0)
        elif i == 0:
            pooled, place = sample, torch.zeros_like(sample, dtype=torch.int32)
        else:
            is_larger = sample > pooled
            pooled, place = torch.where(is_larger, sample, pooled), place.masked_fill(is_larger, i)
    return pooled.to(input), place if argmax is None else argmax


def border_align(
    input: Tensor,  # [B, 4 * C, H, W]
    boxes: Tensor,  # [B, N, 4]
    pool_size: int,
) -> Tensor:  # [B, C, N, 4]
    """Return the largest of ``pool_size + 1`` bilinear samples on each border of each box.

    Args:
        input: [B, 4 * C, H, W]. The maps of the borders at the top, the left, the bottom and the right.
        boxes: [B, N, 4]. The boxes (x1, y1, x2, y2) in pixels of the map.
        pool_size: The number of samples on a border, less one. At most 4096.

    Returns:
        [B, C, N, 4]. The samples. One further than a pixel outside the map is 0.

    It is differentiable with respect to ``input``. 16-bit types are computed in float32.

    Raises:
        ValueError: A size or type does not fit. The message names the argument.
        RuntimeError: ``boxes`` are on another device.

    Source: Paper "BorderDet" (Qiu et al.). The signature is mmcv's.
    """
    return border_samples(input, boxes, pool_size)[0]


@declared(
    input=MAP,
    beziers="real [N, 17]",
    output_size="2 integers, at least 1",
    spatial_scale="number, above 0",
    sampling_ratio="integer",
)
def bezier_align(
    input: Tensor,  # [B, C, H, W]
    beziers: Tensor,  # [N, 17]
    output_size: tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    aligned: bool = True,
) -> Tensor:  # [N, C, PH, PW]
    """Return the mean of bilinear samples in each bin between two Bezier curves.

    Args:
        input: [B, C, H, W]. The maps.
        beziers: [N, 17]. The index of the image, four points (x, y) of the upper curve from left to right, and four of
            the lower curve from right to left. They are bounded as corners of ``roi_align`` are.
        output_size: The number of bins (height, width).
        spatial_scale: The size of the map divided by that of the image.
        sampling_ratio: The samples of a bin in each direction, or 0 for one a pixel.
        aligned: Whether points are moved by half a pixel, as in ``roi_align``.

    Returns:
        [N, C, PH, PW]. The means.

    It is differentiable with respect to ``input``. 16-bit types are computed in float32.

    Raises:
        ValueError: A size does not fit. The message names the argument.

    Source: Paper "ABCNet" (Liu et al.). The signature is mmcv's.
    """
    dtype = computation_dtype(input)
    check_samples("bezier_align", output_size, sampling_ratio)
    least, most = bounds_of(input, spatial_scale, sampling_ratio, dtype)
    points = constant(beziers[:, 1:], input).clamp(least, most).unflatten(1, (8, 2)) * spatial_scale  # (x, y)
    edges = torch.stack([points[:, :4], points[:, 4:].flip(1)], 1)  # the upper one and the lower one
    PH, PW = output_size
    u = torch.arange(PW, device=input.device, dtype=dtype) / PW
    v = (torch.arange(PH, device=input.device, dtype=dtype) / PH)[:, None, None]
    rest = 1 - u
    basis = torch.stack([rest**3, 3 * u * rest**2, 3 * u**2 * rest, u**3])
    curves = torch.einsum("kp,nekd->enpd", basis, edges)
    centers = (
        curves[1][:, None] * v + curves[0][:, None] * (1 - v) - (0.5 if aligned else 0)
    )  # [N, PH, PW, 2]
    sides = (edges[:, :, 0] - edges[:, :, 3]).abs().amax(1)
    bin_size = (sides if aligned else sides.clamp(min=1)).flip(1) / sides.new_tensor([PH, PW])
    origin = centers.flip(3).permute(0, 3, 1, 2) - bin_size[:, :, None, None] / 2
    index = beziers[:, 0]
    is_known = _is_known(index, input, beziers)
    batch = torch.where(is_known, index, 0).long()
    grid = torch.where(is_known[:, None], samples_of(bin_size, sampling_ratio), 0)
    turns = bin_size[:, :0]  # none
    return pool_samples(widened(input, input), origin, batch, bin_size, grid, turns, False).to(input)


@declared(
    features=MAP,
    rois=UPRIGHT,
    output_size="2 integers, at least 1",
    spatial_scale="number, above 0",
)
def prroi_pool(
    features: Tensor,  # [B, C, H, W]
    rois: Tensor,  # [N, 5]
    output_size: tuple[int, int],
    spatial_scale: float = 1.0,
) -> Tensor:  # [N, C, PH, PW]
    """Return the mean of each bin of each region, as the integral of the map with bilinear interpolation.

    Args:
        features: [B, C, H, W]. The maps.
        rois: [N, 5]. The index of the image and the region (x1, y1, x2, y2).
        output_size: The number of bins (height, width).
        spatial_scale: The size of the map divided by that of the image.

    Returns:
        [N, C, PH, PW]. The means. The map is 0 outside. A region without area, or with a NaN, has 0.

    It is differentiable with respect to ``features`` and to the corners of ``rois``, on a CPU once. 16-bit types are
    computed in float32.

    Raises:
        ValueError: A size does not fit. The message names the argument.

    Source: Paper "IoU-Net" (Jiang et al.). The signature is mmcv's.
    """
    check_samples("prroi_pool", output_size)
    rois = widened(rois, features)
    if features.is_cuda or features.numel() == 0 or not _library.serves(features):
        return prroi_pool_reference(features, rois, output_size, spatial_scale)
    return _prroi_pool(features, rois, *output_size, spatial_scale, 0)


def prroi_pool_reference(
    features: Tensor, rois: Tensor, output_size: tuple[int, int], spatial_scale: float = 1.0
) -> Tensor:
    """Return what ``prroi_pool`` returns, in plain torch: the definition kernels are tested against."""
    index = rois[:, 0].detach()
    corners = widened(rois[:, 1:], features) * spatial_scale
    is_known = _is_known(index, features, corners)
    weights = []
    x1, y1, x2, y2 = torch.where(is_known[:, None], corners, 0).unbind(1)
    H, W = features.shape[2:]
    for low, high, bins, size in ((y1, y2, output_size[0], H), (x1, x2, output_size[1], W)):
        step = (high - low).clamp(min=0)[:, None] / bins
        edges = low[:, None] + step * numbers_to(bins + 1, rois)
        # The integral up to an edge of the weight that a pixel has in linear interpolation.
        position = (edges[:, :, None] - numbers_to(size, rois)).clamp(-1, 1)
        integral = 0.5 + position - position * position.abs() / 2
        is_wide = (step > 0)[..., None]
        # [N, bins, size]
        weights.append(
            torch.where(is_wide, integral.diff(dim=1) / torch.where(is_wide, step[..., None], 1), 0)
        )
    pooled = corners.new_zeros(len(rois), features.shape[1], *output_size) + empty_sum(features)
    for image, maps in enumerate(widened(features, features)):
        chosen = (is_known & (index == image)).nonzero()[:, 0]
        down, across = (weight[chosen] for weight in weights)
        pooled = pooled.index_copy(0, chosen, torch.einsum("nph,chw,nqw->ncpq", down, maps, across))
    return pooled.to(features)


def _is_known(index: Tensor, maps: Tensor, numbers: Tensor) -> Tensor:
    """Return whether each region is of one of the maps and all its numbers are finite."""
    return is_image(index, len(maps)) & numbers.isfinite().all(1)


def _corners_gradient(grad: Tensor, features: Tensor, rois: Tensor, PH: int, PW: int, scale: float) -> Tensor:
    """Return the gradient of the corners. An edge adds to a mean what the mean on its line differs from it."""
    grad, features = (one.to(rois) for one in (grad, features))
    means = _prroi_pool(features, rois, PH, PW, scale, 0)
    gradients = []
    for axis, bins in ((1, PW), (2, PH)):
        lines = _prroi_pool(features, rois, PH, PW, scale, axis).transpose(-axis, -1)
        part = numbers_to(bins + 1, rois) / bins  # of the way from the low corner to the high one
        of_mean, mean = grad.transpose(-axis, -1), means.transpose(-axis, -1)
        of_low = (of_mean * (mean - lines[..., :-1])).sum((1, 2))
        of_high = (of_mean * (lines[..., 1:] - mean)).sum((1, 2))
        step = (rois[:, axis + 2] - rois[:, axis]) / bins
        for weight in (1 - part, part):
            total = (of_low * weight[:-1] + of_high * weight[1:]).sum(1)
            gradients.append(torch.where(total == 0, total, total / step))
    x1, x2, y1, y2 = gradients
    return torch.stack([torch.zeros_like(x1), x1, y1, x2, y2], 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.settings = inputs[2:5]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    features, rois = ctx.saved_tensors
    B, _, H, W = features.shape
    of_features = of_rois = None
    if ctx.needs_input_grad[0]:
        of_features = torch.ops.visdet.prroi_pool_backward.default(grad, rois, B, H, W, ctx.settings[2])
    if ctx.needs_input_grad[1]:
        of_rois = _corners_gradient(grad, features, rois, *ctx.settings)
    return of_features, of_rois, None, None, None, None


_prroi_pool = _registration.differentiable(
    "prroi_pool",
    lambda given: given.features.new_empty(
        given.rois.shape[0],
        given.features.shape[1],
        given.pooled_height + (given.lines == 2),
        given.pooled_width + (given.lines == 1),
    ),
    gradient=SimpleNamespace(
        fake=empty_maps,
        save=_save,
        backward=_backward,
    ),
)
