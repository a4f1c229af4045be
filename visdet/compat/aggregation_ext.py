"""The functions of ``deformable_aggregation_ext`` and ``deformable_aggregation_with_depth_ext``, under their names.

Two extensions have the first name. That of SparseDrive and Sparse4D has all cameras in one run of rows and sums over
the points of a query. That of SparseDriveV2, RIFT and BIP3D has each camera apart and leaves the sum to its caller. The
number of dimensions of ``mc_ms_feat`` says which one is meant::

                       all cameras in one run  each camera apart
    mc_ms_feat         [B, S, C]               [B, V, S, C]
    spatial_shape      [V, L, 2]               [L, 2]            (height, width)
    scale_start_index  [V, L]                  [L]
    sampling_location  [B, Q, P, V, 2]         [B, N, V, 2]      (x, y) in 0..1
    weights            [B, Q, P, V, L, G]      [B, N, V, L, G]
    result             [B, Q, C]               [B, N, C]

With depth, the last ``num_depths`` columns of ``mc_ms_feat`` are the depth distribution of each row, and locations have
the fractional index of their depth as a third coordinate. ``visdet.compat.extensions`` makes this module importable
under the names of the extensions, also within a package.
"""

from typing import Any

import torch
from torch import Tensor

from visdet import ops

from ._served import SERVED, Gradient, GradOutput, serves


def tables_of_cameras(
    features: Tensor,  # [B, V, S, C]
    level_shapes: Tensor,  # [L, 2]
    level_starts: Tensor,  # [L]
) -> tuple[Tensor, Tensor]:  # [V, L, 2], [V, L]
    """Return the level tables of ``features.flatten(1, 2)``."""
    V, S = features.shape[1:3]
    first_rows = S * torch.arange(V, device=level_starts.device)
    return level_shapes.expand(V, -1, -1), level_starts.to(torch.int64) + first_rows[:, None]


def _aggregate(
    mc_ms_feat: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sampling_location: Tensor,
    weights: Tensor,
    num_depths: int | None = None,
) -> Tensor:
    """Return the result of visdet's operator for either layout. Features are not copied.

    Raises:
        RuntimeError: a shape, type, size or device does not fit. The message names the argument and the layout.
    """
    is_apart = mc_ms_feat.dim() == 4
    layout = "[B, V, S, C]: each camera apart" if is_apart else "[B, S, C]: all cameras in one run"
    try:
        features = mc_ms_feat
        if is_apart:
            tables = tables_of_cameras(mc_ms_feat, spatial_shape, scale_start_index)
            features = mc_ms_feat.flatten(1, 2)
            samples = sampling_location.unsqueeze(2), weights.unsqueeze(2)  # P = 1
        else:
            tables = (spatial_shape, scale_start_index)
            samples = (sampling_location, weights)
        if num_depths is None:
            return ops.deformable_aggregation(features, *tables, *samples)
        features, depths = features.split([features.shape[-1] - num_depths, num_depths], -1)
        return ops.deformable_aggregation_with_depth(features, depths, *tables, *samples)
    except RuntimeError as error:
        shape = list(mc_ms_feat.shape)
        raise type(error)(f"{error} (mc_ms_feat {shape} was taken for {layout})") from error


@serves(_aggregate, "deformable_aggregation_ext.deformable_aggregation_forward")
def deformable_aggregation_forward(
    mc_ms_feat: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sampling_location: Tensor,
    weights: Tensor,
) -> Any: ...


@serves(
    _aggregate,
    "deformable_aggregation_ext.deformable_aggregation_backward",
    grad_mc_ms_feat="mc_ms_feat",
    grad_sampling_location="sampling_location",
    grad_weights="weights",
)
def deformable_aggregation_backward(
    mc_ms_feat: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sampling_location: Tensor,
    weights: Tensor,
    grad_output: GradOutput,
    grad_mc_ms_feat: Gradient,
    grad_sampling_location: Gradient,
    grad_weights: Gradient,
) -> None: ...


@serves(_aggregate, "deformable_aggregation_ext.deformable_aggregation_with_depth_forward")
def deformable_aggregation_with_depth_forward(
    mc_ms_feat: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sampling_location: Tensor,
    weights: Tensor,
    num_depths: int,
) -> Any: ...


@serves(
    _aggregate,
    "deformable_aggregation_ext.deformable_aggregation_with_depth_backward",
    grad_mc_ms_feat="mc_ms_feat",
    grad_sampling_location="sampling_location",
    grad_weights="weights",
)
def deformable_aggregation_with_depth_backward(
    mc_ms_feat: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sampling_location: Tensor,
    weights: Tensor,
    num_depths: int,
    grad_output: GradOutput,
    grad_mc_ms_feat: Gradient,
    grad_sampling_location: Gradient,
    grad_weights: Gradient,
) -> None: ...


__all__ = list(SERVED["deformable_aggregation_ext"])
