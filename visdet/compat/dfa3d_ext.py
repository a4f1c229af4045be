"""The functions of ``dfa3D._ext`` (DFA3D, GaussianFormer3D): attention whose samples know their depth.

A sample has a score for each of the four texels around it: those at the top, the left one first, and those below, the
right one first.
"""

from typing import Any

import torch
from torch import Tensor

from visdet import ops

from ._mmcv_functions import wide_type
from ._served import SERVED, Gradient, GradOutput, serves

_CORNERS = ((0, 0), (1, 0), (1, 1), (0, 1))  # (x, y)


def _weighted_attention(
    value: Tensor,  # [B, S, G, C]
    spatial_shapes: Tensor,  # [L, 2] (height, width)
    level_start_index: Tensor,  # [L]
    sampling_loc: Tensor,  # [B, Q, G, L, P, 2] (x, y) in 0..1
    attn_weight: Tensor,  # [B, Q, G, L, P]
    depth_score: Tensor,  # [B, Q, G, L, P, 4]
) -> Tensor:  # [B, Q, G * C]
    """Return the attention to the four texels of each sample, whose centres are samples of ``ms_deform_attn``."""
    wide = wide_type(value)
    sizes = spatial_shapes.flip(1).to(wide)
    at = sampling_loc.to(wide) * sizes[:, None] - 0.5
    low = at.detach().floor()
    offsets = at.new_tensor(_CORNERS)
    part = (at - low)[..., None, :]
    x, y = torch.where(offsets > 0, part, 1 - part).unbind(-1)
    weights = attn_weight.to(wide)[..., None] * depth_score.to(wide) * x * y
    texels = (low[..., None, :] + offsets + 0.5) / sizes[:, None, None]
    return ops.ms_deform_attn(
        value, spatial_shapes, level_start_index, texels.flatten(4, 5), weights.flatten(4)
    )


def _depth_scores(
    value: Tensor,  # [B, S, G, D]
    spatial_shapes: Tensor,  # [L, 3] (height, width, depths)
    level_start_index: Tensor,  # [L]
    sampling_loc: Tensor,  # [B, Q, G, L, P, 3] (x, y, depth) in 0..1
) -> Tensor:  # [B, Q, G, L, P, 4]
    """Return the number of each of the four texels at the sample's depth, between its two nearest depths."""
    wide = wide_type(value)
    height, width, depths = spatial_shapes.to(wide).unbind(1)
    sizes = torch.stack([width, height, depths], 1)[:, None]
    at = sampling_loc.to(wide) * sizes - 0.5
    low = at.detach().floor()
    corners = low[..., None, :2] + at.new_tensor(_CORNERS)
    counts = ((at > -1) & (at < sizes)).all(-1, keepdim=True)
    counts = counts & ((corners >= 0) & (corners < sizes[:, None, :, :2])).all(-1)
    x, y = corners.unbind(-1)
    rows = level_start_index[:, None, None] + torch.where(counts, y * width[:, None, None] + x, 0).long()
    _, _, G, D = value.shape
    heads = torch.arange(G, device=value.device)[:, None, None, None]
    first = (rows * G + heads) * D
    numbers = value.to(wide).flatten(1)
    depth = low[..., 2:]
    beyond = at[..., 2:] - depth
    scores = torch.zeros_like(corners[..., 0])
    for index, share in ((depth, 1 - beyond), (depth + 1, beyond)):
        is_in = counts & (index >= 0) & (index < sizes[..., 2:])
        place = torch.where(is_in, first + torch.where(is_in, index, 0).long(), 0)
        found = numbers.gather(1, place.flatten(1)).view(place.shape)
        scores = scores + torch.where(is_in, found * share, 0)
    return scores.to(value.dtype)


@serves(_weighted_attention, "dfa3D._ext.wms_deform_attn_forward")
def wms_deform_attn_forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    depth_score: Tensor,
    im2col_step: object = None,
) -> Any: ...


@serves(
    _weighted_attention,
    "dfa3D._ext.wms_deform_attn_backward",
    grad_value="value",
    grad_sampling_loc="sampling_loc",
    grad_attn_weight="attn_weight",
    grad_depth_score="depth_score",
)
def wms_deform_attn_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    depth_score: Tensor,
    grad_output: GradOutput,
    grad_value: Gradient,
    grad_sampling_loc: Gradient,
    grad_attn_weight: Gradient,
    grad_depth_score: Gradient,
    im2col_step: object = None,
) -> None: ...


@serves(_depth_scores, "dfa3D._ext.ms_depth_score_sample_forward")
def ms_depth_score_sample_forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    im2col_step: object = None,
) -> Any: ...


@serves(
    _depth_scores,
    "dfa3D._ext.ms_depth_score_sample_backward",
    grad_value="value",
    grad_sampling_loc="sampling_loc",
)
def ms_depth_score_sample_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    grad_output: GradOutput,
    grad_value: Gradient,
    grad_sampling_loc: Gradient,
    im2col_step: object = None,
) -> None: ...


__all__ = list(SERVED["dfa3D._ext"])
