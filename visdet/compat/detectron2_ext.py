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
from ._served import SERVED, Gradient, GradOutput, Result, gradients_of, serves
from .msda_ext import get_compiler_version, get_cuda_version


def has_cuda() -> bool:
    """Return False: there is no file whose architectures detectron2's report could list."""
    return False


@serves(
    ops.deform_conv2d,
    "detectron2._C.deform_conv_forward",
    dH="stride",
    dW="stride",
    padH="padding",
    padW="padding",
    dilationH="dilation",
    dilationW="dilation",
    group="groups",
    deformable_group="deform_groups",
)
def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Result,
    columns: object,
    ones: object,
    kW: object,
    kH: object,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: object,
) -> None: ...


@serves(
    ops.deform_conv2d,
    "detectron2._C.deform_conv_backward_input",
    grad_input="input",
    grad_offset="offset",
    dH="stride",
    dW="stride",
    padH="padding",
    padW="padding",
    dilationH="dilation",
    dilationW="dilation",
    group="groups",
    deformable_group="deform_groups",
)
def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    grad_output: GradOutput,
    grad_input: Gradient,
    grad_offset: Gradient,
    weight: Tensor,
    columns: object,
    kW: object,
    kH: object,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: object,
) -> None: ...


@serves(
    own.scaled_deform_conv,
    "detectron2._C.deform_conv_backward_filter",
    grad_weight="weight",
    dH="stride",
    dW="stride",
    padH="padding",
    padW="padding",
    dilationH="dilation",
    dilationW="dilation",
    group="groups",
    deformable_group="deform_groups",
)
def deform_conv_backward_filter(
    input: Tensor,
    offset: Tensor,
    grad_output: GradOutput,
    grad_weight: Gradient,
    columns: object,
    ones: object,
    kW: object,
    kH: object,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    scale: float,
    im2col_step: object,
) -> None: ...


@serves(
    own.modulated_deform_conv,
    "detectron2._C.modulated_deform_conv_forward",
    stride_h="stride",
    stride_w="stride",
    pad_h="padding",
    pad_w="padding",
    dilation_h="dilation",
    dilation_w="dilation",
    group="groups",
    deformable_group="deform_groups",
)
def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: object,
    offset: Tensor,
    mask: Tensor,
    output: Result,
    columns: object,
    kernel_h: object,
    kernel_w: object,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None: ...


@serves(
    own.modulated_deform_conv,
    "detectron2._C.modulated_deform_conv_backward",
    grad_input="input",
    grad_weight="weight",
    grad_bias="bias",
    grad_offset="offset",
    grad_mask="mask",
    grad_output="output",
    stride_h="stride",
    stride_w="stride",
    pad_h="padding",
    pad_w="padding",
    dilation_h="dilation",
    dilation_w="dilation",
    group="groups",
    deformable_group="deform_groups",
)
def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: object,
    offset: Tensor,
    mask: Tensor,
    columns: object,
    grad_input: Gradient,
    grad_weight: Gradient,
    grad_bias: Gradient,
    grad_offset: Gradient,
    grad_mask: Gradient,
    grad_output: GradOutput,
    kernel_h: object,
    kernel_w: object,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None: ...


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
