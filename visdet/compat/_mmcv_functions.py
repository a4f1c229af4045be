"""Operators as several functions of extensions need them, which differ from those of visdet (``mmcv_ext``)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet import ops
from visdet.ops.gather_points import gather_gradient as gradient_of_points
from visdet.ops.mmcv import points_in_boxes
from visdet.ops.roi_pool import roi_pool_gradient as gradient_of_pool

FAR = 1e10  # the squared distance from which on a point is no neighbour in mmcv


# Boxes
def _kept(suppress: Callable[..., Tensor], boxes: Tensor, nms_overlap_thresh: float) -> tuple[Tensor, int]:
    """Return the indices that are kept of boxes in the order of their scores, and their number."""
    kept = suppress(boxes, boxes.new_zeros(len(boxes)), nms_overlap_thresh)  # Equal scores keep their order.
    return kept, len(kept)


nms3d = partial(_kept, ops.nms3d)
nms3d_normal = partial(_kept, ops.nms3d_normal)


# Losses
sigmoid_focal_loss = partial(ops.sigmoid_focal_loss, reduction="none")


def softmax_focal_loss(
    softmax: Tensor, target: Tensor, weight: Tensor | None, gamma: float, alpha: float, shift: Any = 0.0
) -> Tensor:
    """Return the loss of logits that have this softmax, because the wrapper does not pass its own, plus ``shift``."""
    logits = softmax.clamp(min=torch.finfo(softmax.dtype).tiny).log() + shift
    return ops.softmax_focal_loss(logits, target, gamma, alpha, weight, "none")


# Regions
def roi_align_again(
    input: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    output_size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: str,
    aligned: bool,
) -> Tensor:
    """Return the pooled regions of zeros, which are added to what the forward function has kept."""
    maps = input + argmax_y if pool_mode == "max" else input
    return ops.roi_align(maps, rois, output_size, spatial_scale, sampling_ratio, pool_mode, aligned)


def roi_pool_gradient(grad_output: Tensor, rois: Tensor, argmax: Tensor, grad_input: Tensor) -> Tensor:
    sizes = grad_input.shape[0], *grad_input.shape[2:]
    return gradient_of_pool(grad_output, rois.to(wide_type(grad_output)), argmax.int(), sizes)


# Maps
def carafe(
    features: Tensor, masks: Tensor, kernel_size: int, group_size: int, scale_factor: int
) -> tuple[Tensor, Tensor]:
    """Return the features, which the wrapper keeps for the backward pass, and the result.

    mmcv's kernels would write the features in channels-last order.
    """
    return features, ops.carafe(features, masks, kernel_size, group_size, scale_factor)


def scaled_deform_conv(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    deform_groups: int,
    scale: float,
) -> Tensor:
    return scale * ops.deform_conv2d(input, offset, weight, stride, padding, dilation, groups, deform_groups)


def modulated_deform_conv(
    input: Tensor,
    offset: Tensor,
    mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    output: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    deform_groups: int,
    with_bias: bool,
) -> Tensor:
    """Return the convolution for an offset and a mask that may be of another size than the output.

    mmcv's C++ does not compare the sizes. It reads the memory of each image from its start as if it were of the size of
    the output. DyHead relies on that.
    """

    def from_start(maps: Tensor) -> Tensor:
        size = output.shape[2:]
        count = size.numel()
        own = maps.shape[2:]
        if maps.dim() != 4 or own == size or own.numel() < count:
            return maps
        channels = maps.shape[1]
        return maps.flatten(1)[:, : channels * count].unflatten(1, (channels, *size))

    return ops.modulated_deform_conv2d(
        input,
        from_start(offset),
        from_start(mask),
        weight,
        bias if with_bias else None,
        stride,
        padding,
        dilation,
        groups,
        deform_groups,
    )


def masked_im2col(
    features: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    kernel_h: int,
    kernel_w: int,
    pad_h: int,
    pad_w: int,
) -> Tensor:
    """Return the pixels of the window at each unmasked place in a column. Places and pixels outside the map give 0."""
    padded = F.pad(features[0], (pad_w, pad_w, pad_h, pad_h))
    windows = padded.unfold(1, kernel_h, 1).unfold(2, kernel_w, 1)  # [C, H', W', kernel_h, kernel_w]
    is_inside = _are_inside(mask_h_idx, mask_w_idx, *windows.shape[1:3])
    rows = mask_h_idx.where(is_inside, 0)
    columns = mask_w_idx.where(is_inside, 0)
    return windows[:, rows, columns].movedim(1, -1).flatten(0, 2).where(is_inside, 0)


def masked_col2im(
    col: Tensor, mask_h_idx: Tensor, mask_w_idx: Tensor, output: Tensor, height: int, width: int
) -> Tensor:
    """Return the map with each column at its place. Columns of places outside the map are dropped."""
    is_inside = _are_inside(mask_h_idx, mask_w_idx, height, width)
    filled = output.clone()
    filled[0][:, mask_h_idx[is_inside], mask_w_idx[is_inside]] = col[:, is_inside]
    return filled


def _are_inside(rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:
    return (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)


def rotated_feature_align(features: Tensor, best_bboxes: Tensor, spatial_scale: float, points: int) -> Tensor:
    B, _, H, W = features.shape
    if best_bboxes.numel() == B * H * W * 5:
        best_bboxes = best_bboxes.reshape(B, H, W, 5)  # R3Det gives [B * H * W, 5]
    return ops.rotated_feature_align(features, best_bboxes, spatial_scale, points)


# Points
def knn(k: int, xyz: Tensor, center_xyz: Tensor) -> tuple[Tensor, Tensor]:
    index, distances = ops.knn(k, xyz, center_xyz)
    is_far = distances >= FAR
    return index.masked_fill(is_far, 0), distances.masked_fill(is_far, FAR)


def three_nn(unknown: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared distances and the indices of the three nearest points.

    SASSD gives points (image, x, y, z) and means neighbours in the same image, where mmcv reads such points as if they
    had three numbers. A point without neighbours in its image gets 1e10 and index 0.
    """
    if unknown.shape[-1] == 4:
        # Images are so far apart that the points of another one are no neighbours.
        known, unknown = (
            torch.cat([1e6 * points[..., :1] + points[..., 1:2], points[..., 2:]], -1)
            for points in (known.double(), unknown.double())
        )
    return knn(3, known, unknown)[::-1]


def points_of_boxes(points: Tensor, boxes: Tensor) -> Tensor:
    return ops.points_in_boxes_all(points[None], boxes[None])[0].T


def roiaware_pool3d(
    rois: Tensor, pts: Tensor, pts_feature: Tensor, pts_idx_of_voxels: Tensor, mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the point of each maximum, the points of each voxel, and the result."""
    D, H, W, most = pts_idx_of_voxels.shape[1:]
    collected = points_in_boxes.collect_points(rois, pts, (D, H, W), most)
    pooled, largest = points_in_boxes.pool_collected(collected, pts_feature, mode)
    return largest, collected, pooled


def roiaware_gradient(
    pts_idx_of_voxels: Tensor, argmax: Tensor, grad_out: Tensor, grad_in: Tensor, mode: str
) -> Tensor:
    C = grad_in.shape[1]
    if mode == "avg":
        voxel, point = points_in_boxes.pairs_of(pts_idx_of_voxels)
        count = pts_idx_of_voxels.flatten(0, 3)[:, :1].clamp(min=1)
        return grad_in.index_add(0, point, (grad_out.reshape(-1, C) / count)[voxel].to(grad_in.dtype))
    grad = grad_out.reshape(1, 1, -1).to(wide_type(grad_in))
    sizes = (1, 1, grad_in.numel())
    gradient = gradient_of_points(grad, sizes, points_in_boxes.places_of(argmax))
    return grad_in + gradient.view(grad_in.shape)


def roipoint_pool3d(
    xyz: Tensor, boxes3d: Tensor, pts_feature: Tensor, pooled_features: Tensor
) -> tuple[Tensor, Tensor]:
    return ops.roipoint_pool3d(xyz, pts_feature, boxes3d, pooled_features.shape[2])


# Voxels
def hard_voxelize(
    points: Tensor, voxel_size: Any, coors_range: Any, max_points: int, max_voxels: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the voxels, their places, the numbers of their points, and the number of voxels."""
    voxels, places, counts = ops.hard_voxelize(points, voxel_size, coors_range, max_points, max_voxels)
    return voxels, places, counts, len(voxels)


def wide_type(tensor: Tensor) -> torch.dtype:
    """Return the type in which sums of a tensor's numbers are computed."""
    return torch.promote_types(tensor.dtype, torch.float32)
