"""The module ``detectron2._C``, and the operators ``torch.ops.detectron2`` that it defines.

Deformable convolution, and the suppression, the overlaps and the pooling of rotated boxes are visdet's. Any other
function raises a NotImplementedError when it is called. Angles are degrees there, and towards -y.
"""

import torch
from torch import Tensor

from visdet import ops

from . import _mmcv_functions as own
from ._counts import counted
from ._deferred import deferred
from ._entries import functions_of, gradients_of
from .mmcv_ext import DEFORM, MODULATED
from .msda_ext import get_compiler_version, get_cuda_version

_MODULATED = f"kernel_h kernel_w {MODULATED}"


def has_cuda() -> bool:
    """Return False: there is no file whose architectures detectron2's report could list."""
    return False


FUNCTIONS = functions_of(
    "detectron2._C",
    {
        "deform_conv_forward": (
            ops.deform_conv2d,
            f"input weight offset >output columns ones {DEFORM} im2col_step",
        ),
        "deform_conv_backward_input": (
            ops.deform_conv2d,
            f"input offset <grad_output input>grad_input offset>grad_offset weight columns {DEFORM} im2col_step",
        ),
        "deform_conv_backward_filter": (
            own.scaled_deform_conv,
            f"input offset <grad_output weight>grad_weight columns ones {DEFORM} scale im2col_step",
        ),
        "modulated_deform_conv_forward": (
            own.modulated_deform_conv,
            f"input weight bias ones offset mask >output columns {_MODULATED}",
        ),
        "modulated_deform_conv_backward": (
            own.modulated_deform_conv,
            "input weight bias ones offset mask columns input>grad_input weight>grad_weight bias>grad_bias "
            f"offset>grad_offset mask>grad_mask <grad_output:output {_MODULATED}",
        ),
    },
)
globals().update(FUNCTIONS)
__all__ = [*FUNCTIONS, "get_compiler_version", "get_cuda_version", "has_cuda"]

__getattr__ = deferred("detectron2._C")


def _radians(boxes: Tensor) -> Tensor:
    return torch.cat([boxes[:, :-1], boxes[:, -1:].deg2rad()], 1)


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
        lambda dets, scores, iou_threshold: ops.nms_rotated(
            _radians(dets), scores, iou_threshold, clockwise=False
        )[1],
    ),
    (
        "box_iou_rotated",
        "Tensor boxes1, Tensor boxes2",
        lambda boxes1, boxes2: ops.box_iou_rotated(_radians(boxes1), _radians(boxes2), clockwise=False),
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
