"""The functions of extensions for boxes in space, by the name of the extension.

They are those of ``mmdet3d.ops`` up to mmdet3d 0.18 (``iou3d_cuda`` and ``roiaware_pool3d_ext``) and of ``pcdet.ops``
(``…_cuda``), with the boxes of each package; see ``points_ext``.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.iou3d import from_above

from . import _mmcv_functions as own
from ._served import FirstRows, PoolMode, Result, serves


# visdet's boxes are (x, y, z, dx, dy, dz, heading), with z at the bottom where points are looked for in them.
def _from_corners(boxes: Tensor) -> Tensor:
    """Return boxes of mmdet3d's (x1, y1, x2, y2, angle towards -y) as visdet's."""
    low, high, angle = boxes[:, :5].split((2, 2, 1), 1)
    zeros = torch.zeros_like(angle)
    return torch.cat([(low + high) / 2, zeros, high - low, zeros + 1, -angle], 1)


def _from_lidar(boxes: Tensor) -> Tensor:
    """Return boxes of mmdet3d's (x, y, z, w, l, h, angle of -y towards -x) as visdet's."""
    turned = boxes[..., [0, 1, 2, 4, 3, 5, 6]]
    turned[..., 6] = -(turned[..., 6] + math.pi / 2)
    return turned


def _from_center(boxes: Tensor) -> Tensor:
    """Return boxes of OpenPCDet, whose z is that of the center, as visdet's."""
    lowered = boxes.clone()
    lowered[..., 2] -= boxes[..., 5] / 2
    return lowered


def _as_given(boxes: Tensor) -> Tensor:
    return boxes


def _iou_bev(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    return ops.box_iou_rotated(from_above(boxes_a), from_above(boxes_b))


def _paired_overlap(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
    """Return the areas [N, 1] that the boxes of each pair share."""
    return ops.box_iou_rotated(from_above(boxes_a), from_above(boxes_b), "area", aligned=True)[:, None]


def _given(of: Callable[[Tensor], Tensor], operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator that gets the boxes which ``of`` turns into visdet's."""

    @functools.wraps(operator)
    def run(**named: Any) -> Any:
        boxes = {"boxes", "boxes_a", "boxes_b", "boxes3d", "rois"} & named.keys()
        return operator(**named | {name: of(named[name]) for name in boxes})

    return run


def _serve_overlaps(extension: str, of: Callable[[Tensor], Tensor]) -> None:
    """Serve the overlaps and the suppression of boxes that ``of`` turns into visdet's."""

    @serves(_given(of, ops.boxes_overlap_bev), f"{extension}.boxes_overlap_bev_gpu")
    def boxes_overlap_bev(boxes_a: Tensor, boxes_b: Tensor, ans_overlap: Result) -> None: ...

    @serves(_given(of, _iou_bev), f"{extension}.boxes_iou_bev_gpu", f"{extension}.boxes_iou_bev_cpu")
    def boxes_iou_bev(boxes_a: Tensor, boxes_b: Tensor, ans_iou: Result) -> None: ...

    @serves(_given(of, own.nms3d), f"{extension}.nms_gpu", thresh="nms_overlap_thresh")
    def nms(boxes: Tensor, keep: FirstRows, thresh: float, device_id: object = None) -> Any: ...

    @serves(_given(of, own.nms3d_normal), f"{extension}.nms_normal_gpu", thresh="nms_overlap_thresh")
    def nms_normal(boxes: Tensor, keep: FirstRows, thresh: float, device_id: object = None) -> Any: ...


def _serve_points_in_boxes(extension: str, of: Callable[[Tensor], Tensor]) -> None:
    """Serve what looks for points in boxes that ``of`` turns into visdet's."""

    @serves(_given(of, own.roiaware_pool3d), f"{extension}.forward", pool_method="mode")
    def forward(
        rois: Tensor,
        pts: Tensor,
        pts_feature: Tensor,
        argmax: Result,
        pts_idx_of_voxels: Result,
        pooled_features: Result,
        pool_method: PoolMode,
    ) -> None: ...

    @serves(_given(of, ops.points_in_boxes_all), f"{extension}.points_in_boxes_batch")
    def points_in_boxes_batch(boxes: Tensor, points: Tensor, box_idx_of_points: Result) -> None: ...

    @serves(_given(of, own.points_of_boxes), f"{extension}.points_in_boxes_cpu")
    def points_in_boxes_cpu(boxes: Tensor, points: Tensor, pts_indices: Result) -> None: ...

    @serves(_given(of, ops.points_in_boxes_part), f"{extension}.points_in_boxes_gpu")
    def points_in_boxes_gpu(boxes: Tensor, points: Tensor, box_idx_of_points: Result) -> None: ...


_serve_overlaps("iou3d_cuda", _from_corners)
_serve_overlaps("iou3d_nms_cuda", _as_given)
_serve_points_in_boxes("roiaware_pool3d_ext", _from_lidar)
_serve_points_in_boxes("roiaware_pool3d_cuda", _from_center)


@serves(_given(_from_center, own.roipoint_pool3d), "roipoint_pool3d_cuda.forward")
def roipoint_pool3d_forward(
    xyz: Tensor, boxes3d: Tensor, pts_feature: Tensor, pooled_features: Result, pooled_empty_flag: Result
) -> None: ...


@serves(
    own.roiaware_gradient, "roiaware_pool3d_ext.backward", "roiaware_pool3d_cuda.backward", pool_method="mode"
)
def roiaware_pool3d_backward(
    pts_idx_of_voxels: Tensor, argmax: Tensor, grad_out: Tensor, grad_in: Result, pool_method: PoolMode
) -> None: ...


@serves(
    _paired_overlap,
    "iou3d_nms_cuda.boxes_aligned_overlap_bev_gpu",
    "iou3d_nms_cuda.paired_boxes_overlap_bev_gpu",
)
def boxes_aligned_overlap_bev_gpu(boxes_a: Tensor, boxes_b: Tensor, ans_overlap: Result) -> None: ...
