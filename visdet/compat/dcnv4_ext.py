"""The functions of ``DCNv4.ext`` and ``dcnv4._C``, computed as those of ``DCNv3`` and ``visdet.ops.ms_deform_attn``.

DCNv4 packs the offsets and the weights of DCNv3 into one tensor, and so does its attention with the locations and the
logits. ``visdet.compat.extensions`` makes this module importable under these names. How the kernels of the extension
divide their work (``im2col_step``, ``d_stride``, ``block_thread``) has no effect.
"""

from typing import Any

from torch import Tensor

from visdet import ops

from ._mmcv_functions import wide_type
from ._served import GradOutput, serves
from .dcnv3_ext import dcnv3_forward

__all__ = ["dcnv4_backward", "dcnv4_forward", "flash_deform_attn_backward", "flash_deform_attn_forward"]


def dcnv4_forward(
    value: Tensor,  # [B, H, W, G * C]
    p_offset: Tensor,  # [B, Hout, Wout, G * 3 * P or more]
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    group_channels: int,
    offset_scale: float,
    im2col_step: object = None,
    remove_center: int = 0,
    d_stride: object = None,
    block_thread: object = None,
    softmax: bool = False,
) -> Tensor:  # [B, Hout, Wout, G * C]
    """Return ``dcnv3_forward`` for packed offsets and weights.

    Args:
        p_offset: for each group 2 * P offsets, then P weights, with P = kernel_h * kernel_w, or one less without the
            centre. Numbers behind those of the last group have no effect.
        softmax: whether the weights are logits, of which the softmax over the points is taken.
        others: see ``dcnv3_forward``.
    """
    P = kernel_h * kernel_w - remove_center
    packed = p_offset[..., : group * 3 * P].unflatten(-1, (group, 3 * P))
    offsets, weights = packed.split([2 * P, P], -1)
    if softmax:
        weights = _softmax(weights)
    return dcnv3_forward(
        value,
        offsets.flatten(-2),
        weights.flatten(-2),
        kernel_h,
        kernel_w,
        stride_h,
        stride_w,
        pad_h,
        pad_w,
        dilation_h,
        dilation_w,
        group,
        group_channels,
        offset_scale,
        remove_center=bool(remove_center),
    )


@serves(dcnv4_forward, "DCNv4.ext.dcnv4_backward", returns=("value", "p_offset"))
def dcnv4_backward(
    value: Tensor,
    p_offset: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    group_channels: int,
    offset_scale: float,
    im2col_step: object,
    grad_output: GradOutput,
    remove_center: int,
    d_stride: object = None,
    block_thread: object = None,
    softmax: bool = False,
) -> Any: ...


def flash_deform_attn_forward(
    value: Tensor,  # [B, S, G, C]
    spatial_shapes: Tensor,  # [L, 2] (height, width)
    level_start_index: Tensor,  # [L]
    sampling_loc_attn: Tensor,  # [B, Q, G, L * K * 3]
    im2col_step: object = None,
    K: int = 8,
    d_stride: object = None,
    block_thread: object = None,
) -> Tensor:  # [B, Q, G * C]
    """Return ``visdet.ops.ms_deform_attn`` with the softmax of logits over the points of all levels.

    Args:
        value, spatial_shapes, level_start_index: see ``visdet.ops.ms_deform_attn``.
        sampling_loc_attn: for each head L * K locations (x, y) in 0..1, then L * K logits.
        K: the points of a level.
    """
    L = len(spatial_shapes)
    locations, logits = sampling_loc_attn.split([2 * L * K, L * K], -1)
    weights = _softmax(logits).unflatten(-1, (L, K))
    locations = locations.unflatten(-1, (L, K, 2)).to(weights.dtype)
    return ops.ms_deform_attn(value, spatial_shapes, level_start_index, locations, weights)


@serves(
    flash_deform_attn_forward,
    "DCNv4.ext.flash_deform_attn_backward",
    returns=("value", "sampling_loc_attn"),
)
def flash_deform_attn_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc_attn: Tensor,
    grad_output: GradOutput,
    im2col_step: object,
    K: int,
    d_stride: object = None,
    block_thread: object = None,
) -> Any: ...


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1, wide_type(logits))
