"""The functions of the extensions of ``mmdet.ops`` of mmdetection 2.0 to 2.2, by the name of the extension.

Labels are those of these versions, in which the background is the last class. Boxes of ``roi_align_ext``'s functions
``…_v1`` end a pixel behind their last one, and may be smaller than a pixel of the map.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.roi_pool import roi_pool_with_argmax

from . import _mmcv_functions as own
from . import mmcv_ext  # noqa: F401  (declares deformable convolution and nms_match)
from ._served import SERVED, Gradient, GradOutput, Result, SoftMethod, computes, serves
from .msda_ext import get_compiler_version
from .msda_ext import get_cuda_version as get_compiling_cuda_version


def _roi_align_v1(
    features: Tensor, rois: Tensor, output_size: tuple[int, int], spatial_scale: float, sample_num: int
) -> Tensor:
    half = 0.5 / spatial_scale
    moved = rois + rois.new_tensor([0, half, half, 1 + half, 1 + half])
    return ops.roi_align(features, moved, output_size, spatial_scale, sample_num, "avg", True)


@computes("nms_ext.nms")
def _nms(dets: Tensor, iou_thr: float) -> Tensor:
    return ops.nms(dets[:, :4], dets[:, 4], iou_thr)[1]


@computes("nms_ext.soft_nms")
def _soft_nms(dets: Tensor, iou_thr: float, method: SoftMethod, sigma: float, min_score: float) -> Tensor:
    """Return the boxes, their lowered scores and their indices, [N, 6]."""
    kept, index = ops.soft_nms(dets[:, :4], dets[:, 4], iou_thr, sigma, min_score, method)
    return torch.cat([kept, index[:, None].to(kept.dtype)], 1)


@serves(_roi_align_v1, "roi_align_ext.forward_v1", out_h="output_size", out_w="output_size")
def forward_v1(
    features: Tensor,
    rois: Tensor,
    out_h: int,
    out_w: int,
    spatial_scale: float,
    sample_num: int,
    output: Result,
) -> None: ...


@serves(
    _roi_align_v1,
    "roi_align_ext.backward_v1",
    out_h="output_size",
    out_w="output_size",
    grad_input="features",
)
def backward_v1(
    grad_output: GradOutput,
    rois: Tensor,
    out_h: int,
    out_w: int,
    spatial_scale: float,
    sample_num: int,
    grad_input: Gradient,
) -> None: ...


@serves(
    ops.roi_align,
    "roi_align_ext.forward_v2",
    features="input",
    out_h="output_size",
    out_w="output_size",
    sample_num="sampling_ratio",
)
def forward_v2(
    features: Tensor,
    rois: Tensor,
    spatial_scale: float,
    out_h: int,
    out_w: int,
    sample_num: int,
    aligned: bool,
) -> Any: ...


@serves(
    ops.roi_align,
    "roi_align_ext.backward_v2",
    returns=("input",),
    out_h="output_size",
    out_w="output_size",
    batch="input",
    channels="input",
    height="input",
    width="input",
    sample_num="sampling_ratio",
)
def backward_v2(
    grad: GradOutput,
    rois: Tensor,
    spatial_scale: float,
    out_h: int,
    out_w: int,
    batch: int,
    channels: int,
    height: int,
    width: int,
    sample_num: int,
    aligned: bool,
) -> Any: ...


@serves(
    roi_pool_with_argmax,
    "roi_pool_ext.forward",
    features="input",
    pooled_h="output_size",
    pooled_w="output_size",
)
def roi_pool_forward(
    features: Tensor,
    rois: Tensor,
    pooled_h: int,
    pooled_w: int,
    spatial_scale: float,
    output: Result,
    argmax: Result,
) -> None: ...


@serves(own.roi_pool_gradient, "roi_pool_ext.backward")
def roi_pool_backward(
    grad_output: Tensor, rois: Tensor, argmax: Tensor, spatial_scale: object, grad_input: Result
) -> None: ...


@serves(own.sigmoid_focal_loss, "sigmoid_focal_loss_ext.forward")
def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, num_classes: object, gamma: float, alpha: float
) -> Any: ...


@serves(own.sigmoid_focal_loss, "sigmoid_focal_loss_ext.backward", returns=("input",))
def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, d_loss: GradOutput, num_classes: object, gamma: float, alpha: float
) -> Any: ...


@serves(own.masked_im2col, "masked_conv2d_ext.masked_im2col_forward")
def masked_im2col_forward(
    features: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    kernel_h: int,
    kernel_w: int,
    pad_h: int,
    pad_w: int,
    data_col: Result,
) -> None: ...


@serves(own.masked_col2im, "masked_conv2d_ext.masked_col2im_forward")
def masked_col2im_forward(
    col: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    height: int,
    width: int,
    channels: object,
    output: Result,
) -> None: ...


@serves(own.carafe, "carafe_ext.forward")
def carafe_forward(
    features: Tensor,
    rfeatures: Result,
    masks: Tensor,
    rmasks: object,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
    routput: object,
    output: Result,
) -> None: ...


@serves(ops.carafe, "carafe_ext.backward", rfeatures="features", grad_input="features", grad_masks="masks")
def carafe_backward(
    grad_output: GradOutput,
    rfeatures: Tensor,
    masks: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
    rgrad_output: object,
    rgrad_input_hs: object,
    rgrad_input: object,
    rgrad_masks: object,
    grad_input: Gradient,
    grad_masks: Gradient,
) -> None: ...


@serves(ops.carafe, "carafe_naive_ext.forward")
def carafe_naive_forward(
    features: Tensor, masks: Tensor, kernel_size: int, group_size: int, scale_factor: int, output: Result
) -> None: ...


@serves(ops.carafe, "carafe_naive_ext.backward", grad_input="features", grad_masks="masks")
def carafe_naive_backward(
    grad_output: GradOutput,
    features: Tensor,
    masks: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
    grad_input: Gradient,
    grad_masks: Gradient,
) -> None: ...


SERVED["compiling_info"] = {
    "get_compiler_version": get_compiler_version,
    "get_compiling_cuda_version": get_compiling_cuda_version,
}
for _mode in ("top", "bottom", "left", "right"):
    _pool = functools.partial(ops.corner_pool, mode=_mode)

    @serves(_pool, f"corner_pool_ext.{_mode}_pool_forward")
    def _pool_forward(x: Tensor) -> Any: ...

    @serves(_pool, f"corner_pool_ext.{_mode}_pool_backward", returns=("x",))
    def _pool_backward(x: Tensor, grad_output: GradOutput) -> Any: ...
