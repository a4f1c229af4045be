"""The functions of the extensions of ``mmdet.ops`` of mmdetection 2.0 to 2.2, by the name of the extension.

Labels are those of these versions, in which the background is the last class. Boxes of ``roi_align_ext``'s functions
``…_v1`` end a pixel behind their last one, and may be smaller than a pixel of the map.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.roi_pool import roi_pool_with_argmax

from . import _mmcv_functions as own
from ._entries import functions_of, gradients_of
from .detectron2_ext import FUNCTIONS as DEFORMABLE_CONVOLUTION
from .msda_ext import get_compiler_version
from .msda_ext import get_cuda_version as get_compiling_cuda_version

__all__ = ["FUNCTIONS"]


def _nms(dets: Tensor, iou_thr: float) -> Tensor:
    return ops.nms(dets[:, :4], dets[:, 4], iou_thr)[1]


def _soft_nms(dets: Tensor, iou_thr: float, method: str, sigma: float, min_score: float) -> Tensor:
    """Return the boxes, their lowered scores and their indices, [N, 6]."""
    kept, index = ops.soft_nms(dets[:, :4], dets[:, 4], iou_thr, sigma, min_score, method)
    return torch.cat([kept, index[:, None].to(kept.dtype)], 1)


def _roi_align_v1(
    features: Tensor, rois: Tensor, output_size: tuple[int, int], spatial_scale: float, sample_num: int
) -> Tensor:
    half = 0.5 / spatial_scale
    moved = rois + rois.new_tensor([0, half, half, 1 + half, 1 + half])
    return ops.roi_align(features, moved, output_size, spatial_scale, sample_num, "avg", True)


def _roi_align_v2(
    features: Tensor,
    rois: Tensor,
    spatial_scale: float,
    output_size: tuple[int, int],
    sample_num: int,
    aligned: bool,
) -> Tensor:
    return ops.roi_align(features, rois, output_size, spatial_scale, sample_num, "avg", aligned)


def _roi_align_v2_gradient(
    grad: Tensor,
    rois: Tensor,
    spatial_scale: float,
    output_size: tuple[int, int],
    map_size: tuple[int, int, int, int],
    sample_num: int,
    aligned: bool,
) -> Tensor:
    def pool(features: Tensor) -> Tensor:
        return _roi_align_v2(features, rois, spatial_scale, output_size, sample_num, aligned)

    return gradients_of("roi_align_ext.backward_v2", pool, [grad.new_zeros(map_size)], [grad])[0]


def _focal_loss(input: Tensor, target: Tensor, gamma: float, alpha: float) -> Tensor:
    return ops.sigmoid_focal_loss(input, target, gamma, alpha, None, "none")


def _focal_loss_gradient(input: Tensor, target: Tensor, d_loss: Tensor, gamma: float, alpha: float) -> Tensor:
    def loss(logits: Tensor) -> Tensor:
        return _focal_loss(logits, target, gamma, alpha)

    return gradients_of("sigmoid_focal_loss_ext.backward", loss, [input], [d_loss])[0]


def _corner_pool(mode: str, input: Tensor) -> list[Tensor]:
    return [ops.corner_pool(input, mode)]


def _corner_pool_gradient(mode: str, input: Tensor, grad_output: Tensor) -> list[Tensor]:
    pool = functools.partial(ops.corner_pool, mode=mode)
    return list(gradients_of(f"corner_pool_ext.{mode}_backward", pool, [input], [grad_output]))


_V1 = "out_h,out_w:output_size spatial_scale sample_num"
_V2 = "spatial_scale out_h,out_w:output_size"
_CARAFE = "kernel_size group_size scale_factor"
_ROWS: dict[str, dict[str, Any]] = {
    "nms_ext": {
        "nms": (_nms, "dets iou_thr"),
        "soft_nms": (_soft_nms, "dets iou_thr method=naive/linear/gaussian sigma min_score"),
        "nms_match": (own.nms_match, "dets iou_thr:iou_threshold"),
    },
    "roi_align_ext": {
        "forward_v1": (_roi_align_v1, f"features rois {_V1} >output"),
        "backward_v1": (_roi_align_v1, f"<grad_output rois {_V1} features>grad_input"),
        "forward_v2": (_roi_align_v2, f"features rois {_V2} sample_num aligned"),
        "backward_v2": (
            _roi_align_v2_gradient,
            f"grad rois {_V2} batch,channels,height,width:map_size sample_num aligned",
        ),
    },
    "roi_pool_ext": {
        "forward": (
            roi_pool_with_argmax,
            "features:input rois pooled_h,pooled_w:output_size spatial_scale >output >argmax",
        ),
        "backward": (own.roi_pool_gradient, "grad_output rois argmax spatial_scale >grad_input"),
    },
    "sigmoid_focal_loss_ext": {
        "forward": (_focal_loss, "input target num_classes gamma alpha"),
        "backward": (_focal_loss_gradient, "input target d_loss num_classes gamma alpha"),
    },
    "masked_conv2d_ext": {
        "masked_im2col_forward": (
            own.masked_im2col,
            "features mask_h_idx mask_w_idx kernel_h kernel_w pad_h pad_w >data_col",
        ),
        "masked_col2im_forward": (
            own.masked_col2im,
            "col mask_h_idx mask_w_idx height width channels >output:output",
        ),
    },
    "carafe_ext": {
        "forward": (own.carafe, f"features >rfeatures masks rmasks {_CARAFE} routput >output"),
        "backward": (
            ops.carafe,
            f"<grad_output rfeatures:features masks {_CARAFE} rgrad_output rgrad_input_hs rgrad_input "
            "rgrad_masks features>grad_input masks>grad_masks",
        ),
    },
    "carafe_naive_ext": {
        "forward": (ops.carafe, f"features masks {_CARAFE} >output"),
        "backward": (
            ops.carafe,
            f"<grad_output features masks {_CARAFE} features>grad_input masks>grad_masks",
        ),
    },
    "deform_pool_ext": {},
}
FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    extension: functions_of(extension, rows) for extension, rows in _ROWS.items()
}
FUNCTIONS["deform_conv_ext"] = {
    name.replace("filter", "parameters"): function for name, function in DEFORMABLE_CONVOLUTION.items()
}
FUNCTIONS["compiling_info"] = {
    "get_compiler_version": get_compiler_version,
    "get_compiling_cuda_version": get_compiling_cuda_version,
}
FUNCTIONS["corner_pool_ext"] = {}
for _mode in ("top", "bottom", "left", "right"):
    FUNCTIONS["corner_pool_ext"] |= {
        f"{_mode}_forward": functools.partial(_corner_pool, _mode),
        f"{_mode}_backward": functools.partial(_corner_pool_gradient, _mode),
    }
