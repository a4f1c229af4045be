"""Feature maps that follow rotated boxes: R3Det's feature refinement and S2ANet's active rotating filters."""

import torch
from torch import Tensor

from .._arguments import constant, widened
from .._declared import check_indices, declared
from ..box_iou_rotated import corners_from_center
from ..sample_sum import sample_sum

__all__ = ["active_rotated_filter", "rotated_feature_align"]


@declared(
    features="floating [B, C, H, W]",
    best_rbboxes="floating [B, H, W, 5]",
    spatial_scale="number",
    points="one of 1, 5",
)
def rotated_feature_align(
    features: Tensor,  # [B, C, H, W]
    best_rbboxes: Tensor,  # [B, H, W, 5] (y, x, w, h, angle)
    spatial_scale: float = 1 / 8,
    points: int = 1,
) -> Tensor:  # [B, C, H, W]
    """Return each pixel plus the features at the centre of its box, or at the centre and the four corners.

    Args:
        features: [B, C, H, W]. The map, of any floating-point type.
        best_rbboxes: [B, H, W, 5] (y, x, w, h, angle). The box of each pixel, in pixels of the image and radians. They
            are not differentiated. mmcv reads the first number as y and the second one as x, and so does this function;
            R3Det gives x first.
        spatial_scale: The number of pixels of the map per pixel of the image.
        points: 1 for the centre, 5 for the centre and the corners.

    Returns:
        [B, C, H, W]. The sums in the type of ``features``. A point beyond one pixel outside the map, or with a
        coordinate that is not finite, adds 0; others are clamped to the map and interpolated.

    It is differentiable with respect to ``features``. The kernels of ``sample_sum`` compute it, with their determinism.

    Raises:
        ValueError: A shape, type, device or ``points`` does not fit. The message names the argument.

    Source: R3Det, arXiv 1908.05612; the signature is mmcv's.
    """
    H, W = features.shape[2:]
    if features.numel() == 0:
        return features.clone()
    boxes = constant(best_rbboxes, features).flatten(1, 2)
    at = boxes[:, :, None, :2].flip(-1) * spatial_scale  # (x, y) of the centres
    if points == 5:
        at = torch.cat([at, at + corners_from_center(boxes[..., 2:4] * spatial_scale, boxes[..., 4:])], 2)
    x, y = at.unbind(-1)
    counts = (x >= -1) & (x <= W) & (y >= -1) & (y <= H)  # [B, Q, D]
    x, y = (one.clamp(0, size - 1) for one, size in ((x, W), (y, H)))
    samples = torch.stack([(2 * x + 1) / W - 1, (2 * y + 1) / H - 1], -1)
    samples = torch.where(counts[..., None], samples, -3.0)  # outside the map, where no pixel is read
    weights = torch.ones_like(samples[:, None, ..., 0])
    sums = sample_sum(features, samples, weights)  # [B, 1, Q, C]
    return features + sums[:, 0].transpose(1, 2).reshape(features.shape).to(features)


@declared(input="floating [M, C, G, KH, KW]", indices="integers [G, KH, KW, R]")
def active_rotated_filter(
    input: Tensor,  # [M, C, G, K, K]
    indices: Tensor,  # [G, K, K, R]
) -> Tensor:  # [M * R, C * G, K, K]
    """Return each filter in R rotations.

    Args:
        input: [M, C, G, K, K]. Filters of M outputs for C inputs of G orientations.
        indices: [G, K, K, R], integers from 1 on. Where a number of a filter is in each rotation, counted over
            [G, K, K]. Every rotation is a permutation.

    Returns:
        [M * R, C * G, K, K]. The rotations of each filter, one after another.

    It is differentiable with respect to ``input``, and deterministic. Gradients of 16 bits are summed in float32.

    Raises:
        ValueError: A shape or type does not fit. The message names the argument.
        RuntimeError: ``indices`` are on another device.

    Source: Oriented response networks, arXiv 1701.01833; the signature is mmcv's, and S2ANet's filters use it.
    """
    (M, C, G, height, width), R = input.shape, indices.shape[3]
    index = indices.long() - 1
    check_indices("active_rotated_filter", "indices", index, G * height * width, "a filter, from 1 on")
    places = index.flatten(0, 2).T[None, :, None].expand(M, R, C, -1)
    # A gradient sums R numbers, which 16-bit types would round one by one. That of a scatter is a gather.
    filters = widened(input.flatten(2), input)[:, None].expand(places.shape)
    rotated = torch.zeros_like(filters, memory_format=torch.contiguous_format).scatter(3, places, filters)
    return rotated.to(input).view(M * R, C * G, height, width)
