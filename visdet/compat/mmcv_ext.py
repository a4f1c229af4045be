"""The functions of ``mmcv._ext``, under mmcv's names and with mmcv's arguments.

Like mmcv's compiled functions, they write into the tensors that mmcv's wrappers allocate. Any other name is that of a
function that raises a NotImplementedError when it is called, because ``mmcv.ops`` looks up all its functions at its
import. This module declares the functions for boxes and regions, and has all of them.
"""

from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.mmcv import aligned_pooling
from visdet.ops.mmcv.diff_iou_rotated import sorted_vertices
from visdet.ops.roi_pool import roi_pool_with_argmax

from . import _mmcv_functions as own
from . import mmcv_ext_activations, mmcv_ext_maps, mmcv_ext_points, mmcv_ext_voxels  # noqa: F401
from ._deferred import deferred
from ._served import (
    SERVED,
    BoxMode,
    FirstRows,
    Gradient,
    GradOutput,
    PoolMode,
    Result,
    SoftMethod,
    computes,
    serves,
)
from .msda_ext import get_compiler_version
from .msda_ext import get_cuda_version as get_compiling_cuda_version


@serves(ops.bbox_overlaps, "mmcv._ext.bbox_overlaps")
def bbox_overlaps(
    bboxes1: Tensor, bboxes2: Tensor, ious: Result, mode: BoxMode, aligned: bool, offset: int
) -> None: ...


@serves(
    aligned_pooling.bezier_align,
    "mmcv._ext.bezier_align_backward",
    rois="beziers",
    grad_input="input",
    aligned_height="output_size",
    aligned_width="output_size",
)
def bezier_align_backward(
    grad_output: GradOutput,
    rois: Tensor,
    grad_input: Gradient,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> None: ...


@serves(
    aligned_pooling.bezier_align,
    "mmcv._ext.bezier_align_forward",
    rois="beziers",
    aligned_height="output_size",
    aligned_width="output_size",
)
def bezier_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Result,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
) -> None: ...


@serves(
    aligned_pooling.border_samples, "mmcv._ext.border_align_backward", argmax_idx="argmax", grad_input="input"
)
def border_align_backward(
    grad_output: GradOutput, boxes: Tensor, argmax_idx: Tensor | None, grad_input: Gradient, pool_size: int
) -> None: ...


@serves(aligned_pooling.border_samples, "mmcv._ext.border_align_forward")
def border_align_forward(
    input: Tensor, boxes: Tensor, output: Result, argmax_idx: Result, pool_size: int
) -> None: ...


@computes("mmcv._ext.box_iou_quadri")
def box_iou_quadri(boxes1: Tensor, boxes2: Tensor, ious: Result, mode_flag: BoxMode, aligned: bool) -> Tensor:
    return ops.box_iou_quadri(boxes1, boxes2, mode_flag, aligned).flatten()


@computes("mmcv._ext.box_iou_rotated")
def box_iou_rotated(
    boxes1: Tensor, boxes2: Tensor, ious: Result, mode_flag: BoxMode, aligned: bool
) -> Tensor:
    return ops.box_iou_rotated(boxes1, boxes2, mode_flag, aligned).flatten()


@computes("mmcv._ext.convex_giou")
def convex_giou(pointsets: Tensor, polygons: Tensor, output: Result) -> Tensor:
    giou, gradient = ops.convex_giou(pointsets, polygons)
    return torch.cat([gradient, giou[:, None]], 1)


@serves(ops.convex_iou, "mmcv._ext.convex_iou")
def convex_iou(pointsets: Tensor, polygons: Tensor, ious: Result) -> None: ...


@serves(
    ops.deform_roi_pool,
    "mmcv._ext.deform_roi_pool_backward",
    grad_input="input",
    grad_offset="offset",
    pooled_height="output_size",
    pooled_width="output_size",
)
def deform_roi_pool_backward(
    grad_output: GradOutput,
    input: Tensor,
    rois: Tensor,
    offset: Tensor | None,
    grad_input: Gradient,
    grad_offset: Gradient,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None: ...


@serves(
    ops.deform_roi_pool,
    "mmcv._ext.deform_roi_pool_forward",
    pooled_height="output_size",
    pooled_width="output_size",
)
def deform_roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    offset: Tensor | None,
    output: Result,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None: ...


@serves(sorted_vertices, "mmcv._ext.diff_iou_rotated_sort_vertices_forward")
def diff_iou_rotated_sort_vertices_forward(vertices: Tensor, mask: Tensor, num_valid: Tensor) -> Any: ...


@serves(ops.min_area_polygons, "mmcv._ext.min_area_polygons")
def min_area_polygons(pointsets: Tensor, polygons: Result) -> None: ...


# Labels stand behind the boxes, too, and boxes of all labels suppress each other. ``visdet.ops.nms_rotated`` and
# ``nms_quadri`` keep labels apart.
@computes("mmcv._ext.nms")
def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    return ops.nms(boxes, scores, iou_threshold, offset)[1]


@computes("mmcv._ext.nms_match", "nms_ext.nms_match")
def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    return [group.tolist() for group in ops.nms_match(dets, iou_threshold)]


@computes("mmcv._ext.nms_quadri")
def nms_quadri(
    dets: Tensor,
    scores: Tensor,
    order: object,
    dets_sorted: object,
    iou_threshold: float,
    multi_label: object,
) -> Tensor:
    return ops.nms_quadri(dets[:, :8], scores, iou_threshold)[1]


@computes("mmcv._ext.nms_rotated")
def nms_rotated(
    dets: Tensor,
    scores: Tensor,
    order: object,
    dets_sorted: object,
    labels: object,
    iou_threshold: float,
    multi_label: object,
) -> Tensor:
    return ops.nms_rotated(dets[:, :5], scores, iou_threshold)[1]


@serves(
    aligned_pooling.prroi_pool,
    "mmcv._ext.prroi_pool_backward",
    grad_input="features",
    pooled_height="output_size",
    pooled_width="output_size",
)
def prroi_pool_backward(
    grad_output: GradOutput,
    rois: Tensor,
    grad_input: Gradient,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None: ...


@serves(
    aligned_pooling.prroi_pool,
    "mmcv._ext.prroi_pool_coor_backward",
    input="features",
    grad_rois="rois",
    pooled_height="output_size",
    pooled_width="output_size",
)
def prroi_pool_coor_backward(
    output: object,
    grad_output: GradOutput,
    input: Tensor,
    rois: Tensor,
    grad_rois: Gradient,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None: ...


@serves(
    aligned_pooling.prroi_pool,
    "mmcv._ext.prroi_pool_forward",
    input="features",
    pooled_height="output_size",
    pooled_width="output_size",
)
def prroi_pool_forward(
    input: Tensor, rois: Tensor, output: Result, pooled_height: int, pooled_width: int, spatial_scale: float
) -> None: ...


@serves(
    ops.riroi_align_rotated,
    "mmcv._ext.riroi_align_rotated_backward",
    grad_input="features",
    pooled_height="out_size",
    pooled_width="out_size",
)
def riroi_align_rotated_backward(
    grad_output: GradOutput,
    rois: Tensor,
    grad_input: Gradient,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    num_samples: int,
    num_orientations: int,
    clockwise: bool,
) -> None: ...


@serves(
    ops.riroi_align_rotated,
    "mmcv._ext.riroi_align_rotated_forward",
    pooled_height="out_size",
    pooled_width="out_size",
)
def riroi_align_rotated_forward(
    features: Tensor,
    rois: Tensor,
    output: Result,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    num_samples: int,
    num_orientations: int,
    clockwise: bool,
) -> None: ...


@serves(
    own.roi_align_again,
    "mmcv._ext.roi_align_backward",
    grad_input="input",
    aligned_height="output_size",
    aligned_width="output_size",
)
def roi_align_backward(
    grad_output: GradOutput,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: object,
    grad_input: Gradient,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: PoolMode,
    aligned: bool,
) -> None: ...


@computes("mmcv._ext.roi_align_forward")
def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Result,
    argmax_y: Tensor,
    argmax_x: object,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: PoolMode,
    aligned: bool,
) -> Tensor:
    """Return the pooled regions. ``argmax_y`` takes a copy of ``input``, which the gradient of the maximum needs."""
    if pool_mode == "max":
        argmax_y.resize_(input.shape).copy_(input)
    size = aligned_height, aligned_width
    return ops.roi_align(input, rois, size, spatial_scale, sampling_ratio, pool_mode, aligned)


@serves(
    ops.roi_align_rotated,
    "mmcv._ext.roi_align_rotated_backward",
    grad_input="input",
    pooled_height="output_size",
    pooled_width="output_size",
)
def roi_align_rotated_backward(
    grad_output: GradOutput,
    rois: Tensor,
    grad_input: Gradient,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    clockwise: bool,
) -> None: ...


@serves(
    ops.roi_align_rotated,
    "mmcv._ext.roi_align_rotated_forward",
    pooled_height="output_size",
    pooled_width="output_size",
)
def roi_align_rotated_forward(
    input: Tensor,
    rois: Tensor,
    output: Result,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    clockwise: bool,
) -> None: ...


@serves(own.roi_pool_gradient, "mmcv._ext.roi_pool_backward")
def roi_pool_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax: Tensor,
    grad_input: Result,
    pooled_height: object,
    pooled_width: object,
    spatial_scale: object,
) -> None: ...


@serves(
    roi_pool_with_argmax,
    "mmcv._ext.roi_pool_forward",
    pooled_height="output_size",
    pooled_width="output_size",
)
def roi_pool_forward(
    input: Tensor,
    rois: Tensor,
    output: Result,
    argmax: Result,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None: ...


@serves(ops.soft_nms, "mmcv._ext.softnms")
def softnms(
    boxes: Any,
    scores: Any,
    dets: FirstRows,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: SoftMethod,
    offset: int,
) -> None: ...


SERVED["mmcv._ext"] |= {
    "get_compiler_version": get_compiler_version,
    "get_compiling_cuda_version": get_compiling_cuda_version,
}
globals().update(SERVED["mmcv._ext"])
__all__ = list(SERVED["mmcv._ext"])

__getattr__ = deferred("mmcv._ext")
