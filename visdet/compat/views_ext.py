"""The functions of ``_msmv_sampling_cuda`` (SparseBEV, SparseOcc), which sample the views of several cameras."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet import ops

from ._served import GradOutput, serves


def _sample_views(
    feat_c2: Tensor,
    feat_c3: Tensor,
    feat_c4: Tensor,
    feat_c5: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    feat_c6: Tensor | None = None,
) -> Tensor:
    """Return the weighted sums [B, Q, C, P] over levels of the samples of each point in the view that it names.

    The maps [B, V, H, W, C] are sampled at (x, y) in 0..1, from the center of the first pixel to that of the last, and
    pixels beside a map are 0. Each map gets a border of zeros, and each view of each level is a camera of
    ``visdet.ops.deformable_aggregation``, which leaves out the cameras that a point is not in.
    """
    B, Q, P, _ = sampling_loc.shape
    levels = (feat_c2, feat_c3, feat_c4, feat_c5, feat_c6)
    maps = [F.pad(one, (0, 0, 1, 1, 1, 1)) for one in levels if one is not None]
    features, shapes, starts = ops.feature_maps_format([[one.movedim(-1, 2)] for one in maps])
    V = feat_c2.shape[1]
    widths = shapes[::V, 0].flip(1).to(sampling_loc)  # [L, 2] (width, height)
    at = (sampling_loc[..., None, :2] * (widths - 3) + 1.5) / widths  # [B, Q, P, L, 2]
    view = (sampling_loc[..., 2] * (V - 1)).round()
    is_in = view[..., None] == torch.arange(V, device=view.device)  # [B, Q, P, V]
    locations = torch.where(is_in[..., None, :, None], at[..., None, :], -1.0).view(B, Q * P, 1, -1, 2)
    weights = attn_weight.repeat_interleave(V, -1).view(B, Q * P, 1, -1, 1, 1)
    summed = ops.deformable_aggregation(features, shapes, starts, locations, weights)
    return summed.unflatten(1, (Q, P)).transpose(2, 3).contiguous()


@serves(_sample_views, "_msmv_sampling_cuda._ms_deform_attn_cuda_c2345_forward")
def sample_four_levels(
    feat_c2: Tensor,
    feat_c3: Tensor,
    feat_c4: Tensor,
    feat_c5: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
) -> Any: ...


@serves(
    _sample_views,
    "_msmv_sampling_cuda._ms_deform_attn_cuda_c2345_backward",
    returns=("feat_c2", "feat_c3", "feat_c4", "feat_c5", "sampling_loc", "attn_weight"),
)
def sample_four_levels_backward(
    grad_output: GradOutput,
    feat_c2: Tensor,
    feat_c3: Tensor,
    feat_c4: Tensor,
    feat_c5: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
) -> Any: ...


@serves(_sample_views, "_msmv_sampling_cuda._ms_deform_attn_cuda_c23456_forward")
def sample_five_levels(
    feat_c2: Tensor,
    feat_c3: Tensor,
    feat_c4: Tensor,
    feat_c5: Tensor,
    feat_c6: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
) -> Any: ...


@serves(
    _sample_views,
    "_msmv_sampling_cuda._ms_deform_attn_cuda_c23456_backward",
    returns=("feat_c2", "feat_c3", "feat_c4", "feat_c5", "feat_c6", "sampling_loc", "attn_weight"),
)
def sample_five_levels_backward(
    grad_output: GradOutput,
    feat_c2: Tensor,
    feat_c3: Tensor,
    feat_c4: Tensor,
    feat_c5: Tensor,
    feat_c6: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
) -> Any: ...
