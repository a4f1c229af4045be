"""The functions of SparseDrive's and Sparse4D's ``deformable_aggregation_ext``, under their names.

``visdet.compat.extensions`` makes this module importable as ``deformable_aggregation_ext``, also within a package.
"""

import torch
from torch import Tensor

from visdet import ops
from visdet.ops.deformable_aggregation import as_tables

__all__ = ["deformable_aggregation_backward", "deformable_aggregation_forward"]


def deformable_aggregation_forward(
    mc_ms_feat: Tensor,  # [B, S, C]
    spatial_shape: Tensor,  # [V, L, 2] (height, width)
    scale_start_index: Tensor,  # [V, L]
    sampling_location: Tensor,  # [B, Q, P, V, 2] (x, y) in 0..1
    weights: Tensor,  # [B, Q, P, V, L, G]
) -> Tensor:  # [B, Q, C]
    """Return the result of ``visdet.ops.deformable_aggregation``.

    Raises:
        RuntimeError: a shape, type, size or device does not fit. The message names the argument.
    """
    return ops.deformable_aggregation(
        mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights
    )


def deformable_aggregation_backward(
    mc_ms_feat: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sampling_location: Tensor,
    weights: Tensor,
    grad_output: Tensor,  # [B, Q, C]
    grad_mc_ms_feat: Tensor,
    grad_sampling_location: Tensor,
    grad_weights: Tensor,
) -> None:
    """Add the gradients of the features, the locations and the weights to the last three tensors.

    The first arguments are those of ``deformable_aggregation_forward``. Each of the last three tensors has the shape of
    the tensor that its gradient belongs to.
    """
    coordinate_dtype = torch.float64 if mc_ms_feat.dtype == torch.float64 else torch.float32
    grads = torch.ops.visdet.deformable_aggregation_backward.default(
        grad_output.to(mc_ms_feat.dtype),
        mc_ms_feat,
        *as_tables(mc_ms_feat, spatial_shape, scale_start_index),
        sampling_location.to(coordinate_dtype),
        weights if weights.dtype == mc_ms_feat.dtype else weights.to(coordinate_dtype),
        torch.are_deterministic_algorithms_enabled(),
    )
    for out, grad in zip((grad_mc_ms_feat, grad_sampling_location, grad_weights), grads, strict=True):
        out.add_(grad)
