"""The functions of ``mmcv._ext`` for boxes and regions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops import _library
from visdet.ops._arguments import check_layout
from visdet.ops._roi_sampling import UPRIGHT, check_rois, check_sampling_ratio
from visdet.ops.box_iou_rotated import MODES, overlaps
from visdet.ops.deform_roi_pool import deform_roi_pool_gradients
from visdet.ops.nms import as_tensors
from visdet.ops.roi_align import regions_gradient
from visdet.ops.roi_pool import roi_pool_gradient, roi_pool_with_argmax
from visdet.ops.soft_nms import SOFT_METHODS

from ._gradients import add_gradients, choice, write

__all__ = [
    "bbox_overlaps",
    "box_iou_quadri",
    "box_iou_rotated",
    "deform_roi_pool_backward",
    "deform_roi_pool_forward",
    "iou3d_boxes_overlap_bev_forward",
    "iou3d_nms3d_forward",
    "iou3d_nms3d_normal_forward",
    "nms",
    "nms_match",
    "nms_quadri",
    "nms_rotated",
    "roi_align_backward",
    "roi_align_forward",
    "roi_pool_backward",
    "roi_pool_forward",
    "softnms",
]


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    boxes, scores, _ = as_tensors("mmcv._ext.nms", boxes, scores, offset)
    return ops.nms(boxes, scores, iou_threshold, offset)[1]


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
    name = choice("softnms", "method", method, SOFT_METHODS)
    result, keep = ops.soft_nms(boxes, scores, iou_threshold, sigma, min_score, name, offset)
    if dets.dim() != 2 or dets.shape[1] != 5 or len(dets) < len(result):
        raise ValueError(f"mmcv._ext.softnms: dets must be [{len(boxes)}, 5], got {list(dets.shape)}")
    dets[: len(result)] = result
    return keep


def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    return [group.tolist() for group in ops.nms_match(dets, iou_threshold)]


def bbox_overlaps(
    bboxes1: Tensor, bboxes2: Tensor, ious: Tensor, mode: int, aligned: bool, offset: int
) -> None:
    name = choice("bbox_overlaps", "mode", mode, ("iou", "iof"))
    write("bbox_overlaps", "ious", ious, ops.bbox_overlaps(bboxes1, bboxes2, name, aligned, offset))


# mmcv's compiled functions for rotated boxes and quadrilaterals are given labels, which stand behind the boxes, too.
# They suppress boxes of all labels together. ``visdet.ops.nms_rotated`` and ``nms_quadri`` keep labels apart.
def nms_rotated(
    dets: Tensor,
    scores: Tensor,
    order: Tensor,
    dets_sorted: Tensor,
    labels: Tensor,
    iou_threshold: float,
    multi_label: int,
) -> Tensor:
    return ops.nms_rotated(dets[:, :5], scores, iou_threshold)[1]


def nms_quadri(
    dets: Tensor,
    scores: Tensor,
    order: Tensor,
    dets_sorted: Tensor,
    iou_threshold: float,
    multi_label: int,
) -> Tensor:
    return ops.nms_quadri(dets[:, :8], scores, iou_threshold)[1]


def _box_iou(name: str, columns: int) -> Callable[[Tensor, Tensor, Tensor, int, bool], None]:
    def entry(boxes1: Tensor, boxes2: Tensor, ious: Tensor, mode_flag: int, aligned: bool) -> None:
        mode = choice(name, "mode_flag", mode_flag, MODES[:2])
        write(name, "ious", ious, overlaps(name, boxes1, boxes2, columns, mode, aligned).flatten())

    return entry


box_iou_rotated = _box_iou("box_iou_rotated", 5)
box_iou_quadri = _box_iou("box_iou_quadri", 8)


def iou3d_boxes_overlap_bev_forward(boxes_a: Tensor, boxes_b: Tensor, ans_overlap: Tensor) -> None:
    overlap = ops.boxes_overlap_bev(boxes_a, boxes_b)
    write("iou3d_boxes_overlap_bev_forward", "ans_overlap", ans_overlap, overlap)


def _kept_in_order(name: str, suppress: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[..., None]:
    """Return an entry that is given boxes in the order of their scores."""

    def entry(boxes: Tensor, keep: Tensor, num_out: Tensor, nms_overlap_thresh: float) -> None:
        scores = boxes.new_zeros(len(boxes))  # Equal scores keep their order.
        kept = suppress(boxes, scores, nms_overlap_thresh)
        if keep.shape != boxes.shape[:1]:
            raise ValueError(f"mmcv._ext.{name}: keep must be [{len(boxes)}], got {list(keep.shape)}")
        keep[: len(kept)] = kept
        num_out.fill_(len(kept))

    return entry


iou3d_nms3d_forward = _kept_in_order("iou3d_nms3d_forward", ops.nms3d)
iou3d_nms3d_normal_forward = _kept_in_order("iou3d_nms3d_normal_forward", ops.nms3d_normal)


def _roi_align(rois: Tensor, settings: dict) -> Callable[[Tensor], Tensor]:
    size = (settings["aligned_height"], settings["aligned_width"])
    mode = choice("roi_align", "pool_mode", settings["pool_mode"], ("max", "avg"))
    scale, ratio, aligned = settings["spatial_scale"], settings["sampling_ratio"], settings["aligned"]
    return lambda input: ops.roi_align(input, rois, size, scale, ratio, mode, aligned)


def roi_align_forward(
    input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor, argmax_x: Tensor, **settings: Any
) -> None:
    """Write the pooled regions to ``output``.

    The backward function of the maximum needs ``input`` but has no argument for it. ``argmax_y`` therefore takes a copy
    of ``input``.
    """
    write("roi_align_forward", "output", output, _roi_align(rois, settings)(input))
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
    size = (settings["aligned_height"], settings["aligned_width"])
    kernel = [settings[name] for name in ("spatial_scale", "sampling_ratio", "aligned")]
    is_mean = settings["pool_mode"] == 1
    if is_mean and add_regions_gradient("roi_align_backward", grad_output, rois, grad_input, size, kernel):
        return
    # The mean is linear, so that its gradient does not depend on the input.
    input = torch.zeros_like(grad_input) if is_mean else argmax_y
    add_gradients("roi_align_backward", _roi_align(rois, settings), [input], grad_output, [grad_input])


def add_regions_gradient(
    entry: str,
    grad_output: Tensor,
    rois: Tensor,
    grad_input: Tensor,
    size: tuple[int, int],
    settings: Sequence[Any],
    layout: str = UPRIGHT,
) -> bool:
    """Write the gradient of a mean over regions if visdet's kernels serve it, and return whether they do.

    They need no forward, which ``add_gradients`` would compute again.
    """
    if not _library.serves(grad_output) or grad_input.numel() == 0:
        return False
    scale, ratio, _ = settings
    full = f"mmcv._ext.{entry}"
    check_rois(full, grad_input, rois, size, scale, layout)
    check_sampling_ratio(full, ratio, size)
    B, C, H, W = grad_input.shape
    expected = len(rois), C, *size
    check_layout(full, "grad_output", grad_output, f"{list(expected)}", *expected)
    write(entry, "grad_input", grad_input, regions_gradient(grad_output, rois, (B, H, W), *settings))
    return True


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
    write("roi_pool_forward", "output", output, pooled)
    write("roi_pool_forward", "argmax", argmax, index)


def roi_pool_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax: Tensor,
    grad_input: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    entry = "mmcv._ext.roi_pool_backward"
    if grad_input.dim() != 4:
        raise ValueError(f"{entry}: grad_input must be [B, C, H, W], got {list(grad_input.shape)}")
    B, C, H, W = grad_input.shape
    expected = [len(rois), C, pooled_height, pooled_width]
    for name, tensor in (("grad_output", grad_output), ("argmax", argmax)):
        if list(tensor.shape) != expected:
            raise ValueError(f"{entry}: {name} must be {expected}, got {list(tensor.shape)}")
    check_rois(entry, grad_input, rois, (pooled_height, pooled_width), spatial_scale)
    wide = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
    grad = roi_pool_gradient(grad_output, rois.to(wide), argmax.int(), (B, H, W))
    write("roi_pool_backward", "grad_input", grad_input, grad)


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
    pooled = ops.deform_roi_pool(input, rois, offset, size, spatial_scale, sampling_ratio, gamma)
    write("deform_roi_pool_forward", "output", output, pooled)


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
    size, settings = (pooled_height, pooled_width), (spatial_scale, sampling_ratio, gamma)
    outputs = [grad_input, grad_offset if offset.numel() else None]
    if (
        _library.serves(input) and offset.numel()
    ):  # They need no forward, which add_gradients would compute again.
        found = deform_roi_pool_gradients(grad_output, input, rois, offset, size, *settings)
        for name, out, grad in zip(
            ("grad_input", "grad_offset"), (grad_input, grad_offset), found, strict=True
        ):
            write("deform_roi_pool_backward", name, out, grad)
        return

    def pool(input: Tensor, offset: Tensor) -> Tensor:
        return ops.deform_roi_pool(input, rois, offset, size, *settings)

    add_gradients("deform_roi_pool_backward", pool, [input, offset], grad_output, outputs)
