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
__all__ = [
    *SERVED["detectron2._C"],
    "box_iou_rotated",
    "get_compiler_version",
    "get_cuda_version",
    "has_cuda",
    "nms_rotated",
    "roi_align_rotated_backward",
    "roi_align_rotated_forward",
]

__getattr__ = deferred("detectron2._C")


def _radians(boxes: Tensor) -> Tensor:
    return torch.cat([boxes[:, :-1], boxes[:, -1:].deg2rad()], 1)


# detectron2 0.1 to 0.5 call these in this module.
def nms_rotated(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return ops.nms_rotated(_radians(dets), scores, iou_threshold, clockwise=False)[1]


def box_iou_rotated(boxes1: Tensor, boxes2: Tensor) -> Tensor:
    return ops.box_iou_rotated(_radians(boxes1), _radians(boxes2), clockwise=False)


def roi_align_rotated_forward(
    input: Tensor, rois: Tensor, spatial_scale: float, height: int, width: int, sampling_ratio: int
) -> Tensor:
    return ops.roi_align_rotated(
        input, _radians(rois), (height, width), spatial_scale, sampling_ratio, True, False
    )


def roi_align_rotated_backward(
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
        return roi_align_rotated_forward(input, rois, spatial_scale, height, width, sampling_ratio)

    return gradients_of("detectron2._C", pool, [grad.new_zeros(B, C, H, W)], [grad])[0]


for _operator in (nms_rotated, box_iou_rotated, roi_align_rotated_forward, roi_align_rotated_backward):
    _name = _operator.__name__
    torch.library.define(f"detectron2::{_name}", torch.library.infer_schema(_operator, mutates_args=()))
    torch.library.impl(f"detectron2::{_name}", "default", counted(f"torch.ops.detectron2.{_name}", _operator))
