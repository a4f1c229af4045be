"""The module ``detectron2._C``, and the operators ``torch.ops.detectron2`` that it defines.

Deformable convolution, and the suppression, the overlaps and the pooling of rotated boxes are visdet's. Any other
function raises a NotImplementedError when it is called. Angles are degrees there, and towards -y.
"""

import torch
from torch import Tensor

from visdet import ops

from . import mmcv_ext_maps  # noqa: F401  (declares deformable convolution)
from ._counts import counted
from ._deferred import deferred
from ._served import SERVED, gradients_of
from .msda_ext import get_compiler_version, get_cuda_version


def has_cuda() -> bool:
    """Return False: there is no file whose architectures detectron2's report could list."""
    return False


globals().update(SERVED["detectron2._C"])
__all__ = [*SERVED["detectron2._C"], "get_compiler_version", "get_cuda_version", "has_cuda"]

__getattr__ = deferred("detectron2._C")


def _radians(boxes: Tensor) -> Tensor:
    return torch.cat([boxes[:, :-1], boxes[:, -1:].deg2rad()], 1)


def _nms_rotated(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return ops.nms_rotated(_radians(dets), scores, iou_threshold, clockwise=False)[1]


def _box_iou_rotated(boxes1: Tensor, boxes2: Tensor) -> Tensor:
    return ops.box_iou_rotated(_radians(boxes1), _radians(boxes2), clockwise=False)


def _roi_align_rotated(
    input: Tensor, rois: Tensor, spatial_scale: float, height: int, width: int, sampling_ratio: int
) -> Tensor:
    return ops.roi_align_rotated(
        input, _radians(rois), (height, width), spatial_scale, sampling_ratio, True, False
    )


def _roi_align_rotated_gradient(
    grad: Tensor,
    rois: Tensor,
    spatial_scale: float,
    height: int,
    width: int,
    B: int,
    C: int,
    H: int,
    W: int,
    sampling_ratio: int,
) -> Tensor:
    def pool(input: Tensor) -> Tensor:
        return _roi_align_rotated(input, rois, spatial_scale, height, width, sampling_ratio)

    return gradients_of("detectron2._C", pool, [grad.new_zeros(B, C, H, W)], [grad])[0]


_SIZES = "Tensor rois, float spatial_scale, int height, int width"
for _name, _declared, _operator in (
    (
        "nms_rotated",
        "Tensor dets, Tensor scores, float iou_threshold",
        _nms_rotated,
    ),
    (
        "box_iou_rotated",
        "Tensor boxes1, Tensor boxes2",
        _box_iou_rotated,
    ),
    ("roi_align_rotated_forward", f"Tensor input, {_SIZES}, int sampling_ratio", _roi_align_rotated),
    (
        "roi_align_rotated_backward",
        f"Tensor grad, {_SIZES}, int B, int C, int H, int W, int sampling_ratio",
        _roi_align_rotated_gradient,
    ),
):
    torch.library.define(f"detectron2::{_name}", f"({_declared}) -> Tensor")
    torch.library.impl(f"detectron2::{_name}", "default", counted(f"torch.ops.detectron2.{_name}", _operator))
    globals()[_name] = _operator  # detectron2 0.1 to 0.5 call it in this module.
    __all__ += [_name]
