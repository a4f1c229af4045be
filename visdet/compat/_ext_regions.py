"""Entries of ``mmcv._ext`` over boxes and regions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.nms import SOFT_METHODS, kept_indices
from visdet.ops.roi_pool import roi_pool_with_argmax

from ._gradients import add_gradients

__all__ = [
    "bbox_overlaps",
    "deform_roi_pool_backward",
    "deform_roi_pool_forward",
    "nms",
    "nms_match",
    "roi_align_backward",
    "roi_align_forward",
    "roi_pool_backward",
    "roi_pool_forward",
    "softnms",
]


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    return kept_indices(boxes, scores, iou_threshold, offset)


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    result, keep = ops.soft_nms(boxes, scores, iou_threshold, sigma, min_score, SOFT_METHODS[method], offset)
    dets[: len(result)] = result
    return keep


def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    return [group.tolist() for group in ops.nms_match(dets, iou_threshold)]


def bbox_overlaps(
    bboxes1: Tensor, bboxes2: Tensor, ious: Tensor, mode: int, aligned: bool, offset: int
) -> None:
    ious.copy_(ops.bbox_overlaps(bboxes1, bboxes2, ("iou", "iof")[mode], aligned, offset))


def _roi_align(rois: Tensor, settings: dict) -> Callable[[Tensor], Tensor]:
    size = (settings["aligned_height"], settings["aligned_width"])
    mode = ("max", "avg")[settings["pool_mode"]]
    scale, ratio, aligned = settings["spatial_scale"], settings["sampling_ratio"], settings["aligned"]
    return lambda input: ops.roi_align(input, rois, size, scale, ratio, mode, aligned)


def roi_align_forward(
    input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor, argmax_x: Tensor, **settings: Any
) -> None:
    """For the maximum, ``argmax_y`` carries the map to the backward, whose signature has no input."""
    output.copy_(_roi_align(rois, settings)(input))
    if settings["pool_mode"] == 0:
        argmax_y.resize_(input.shape).copy_(input)


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    **settings: Any,
) -> None:
    input = argmax_y if settings["pool_mode"] == 0 else torch.zeros_like(grad_input)  # the mean is linear
    add_gradients(_roi_align(rois, settings), [input], grad_output, [grad_input])


def roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    size = (pooled_height, pooled_width)
    pooled, index = roi_pool_with_argmax(input, rois, size, spatial_scale)
    output.copy_(pooled), argmax.copy_(index)


def roi_pool_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax: Tensor,
    grad_input: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    counted = torch.where(argmax >= 0, grad_output, 0).flatten(2)
    per_region = grad_output.new_zeros(len(rois), *grad_input.shape[1:]).flatten(2)
    per_region.scatter_add_(2, argmax.clamp(min=0).long().flatten(2), counted)
    grad_input.flatten(2).index_add_(0, rois[:, 0].long(), per_region)


def deform_roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    offset: Tensor,
    output: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    size = (pooled_height, pooled_width)
    output.copy_(ops.deform_roi_pool(input, rois, offset, size, spatial_scale, sampling_ratio, gamma))


def deform_roi_pool_backward(
    grad_output: Tensor,
    input: Tensor,
    rois: Tensor,
    offset: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    size = (pooled_height, pooled_width)

    def pool(input: Tensor, offset: Tensor) -> Tensor:
        return ops.deform_roi_pool(input, rois, offset, size, spatial_scale, sampling_ratio, gamma)

    outputs = [grad_input, grad_offset if offset.numel() else None]
    add_gradients(pool, [input, offset], grad_output, outputs)
