"""Deformable aggregation whose samples are weighted by a distribution of depth in every texel."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _registration
from ._arguments import widened
from ._declared import declared
from ._level_tables import rows_of_tables
from .deformable_aggregation import as_tables, weighted_sum

__all__ = ["deformable_aggregation_with_depth", "deformable_aggregation_with_depth_reference"]


@declared(features="floating", depth_probs="floating", locations="real", weights="real")
def deformable_aggregation_with_depth(
    features: Tensor,  # [B, S, C]
    depth_probs: Tensor,  # [B, S, D]
    level_shapes: Tensor | Sequence[Any],  # [V, L, 2] (height, width)
    level_starts: Tensor | Sequence[Any],  # [V, L]
    locations: Tensor,  # [B, Q, P, V, 3] (x, y) in 0..1, depth in 0..D-1
    weights: Tensor,  # [B, Q, P, V, L, G]
) -> Tensor:  # [B, Q, C]
    """Return ``deformable_aggregation`` of features times the probability of a sample's depth in each texel.

    Each corner of a bilinear sample is multiplied by ``(1 - f) * depth_probs[n] + f * depth_probs[n + 1]`` of its
    texel, with ``n = floor(d)`` and ``f = d - n`` for the sample's depth d. An index outside 0..D-1 counts as zero. A
    (point, camera) pair counts iff ``0 < x < 1``, ``0 < y < 1`` and ``-1 < d < D``. Everything else is as in
    ``deformable_aggregation``.

    Args:
        features: [B, S, C]. The maps, as ``deformable_aggregation`` takes them.
        depth_probs: [B, S, D]. Each texel's numbers for D depths, usually a softmax, in the type of ``features``. Parts
            of one tensor [B, S, C + D] are not copied.
        level_shapes: [V, L, 2]. The (height, width) of each camera's levels, as ``deformable_aggregation`` takes them.
        level_starts: [V, L]. The first row of each map, as ``deformable_aggregation`` takes them.
        locations: [B, Q, P, V, 3]. The points' positions (x, y) in the images, in 0..1, and their depths as fractional
            indices into D; float32 (float64 for float64 features). Other types are converted.
        weights: [B, Q, P, V, L, G]. The weights, as ``deformable_aggregation`` takes them.

    Returns:
        [B, Q, C]. The sums, in the type of ``features``, accumulated in float32 (float64 for float64).

    It is differentiable once with respect to ``features``, ``depth_probs``, ``locations`` (the depth included) and
    ``weights``. Autocast, level tables and limits are as in ``deformable_aggregation``. The forward is deterministic
    everywhere, the backward on the CPU and, many times as slowly, on CUDA under
    ``torch.use_deterministic_algorithms(True)``, where it takes 16 bytes of scratch memory a sample
    (B * Q * P * V * L).

    Raises:
        RuntimeError: A shape, size or device does not fit. The message names the argument.
        ValueError: A type does not fit. The message names the argument.
        TypeError: ``level_shapes`` or ``level_starts`` is neither a tensor nor nested sequences of integers.
        NotBuiltError: The CPU library is not built.

    Source: BIP3D, arXiv 2411.14869, whose operator leaves the sum over points to its caller.
    """
    shapes, starts = as_tables(features, level_shapes, level_starts)
    locations = widened(locations, features)
    if weights.dtype != features.dtype:
        weights = widened(weights, features)
    return _deformable_aggregation_with_depth(features, depth_probs, shapes, starts, locations, weights)


def deformable_aggregation_with_depth_reference(
    features: Tensor,  # [B, S, C]
    depth_probs: Tensor,  # [B, S, D]
    level_shapes: Tensor,  # [V, L, 2] (height, width)
    level_starts: Tensor,  # [V, L]
    locations: Tensor,  # [B, Q, P, V, 3] (x, y) in 0..1, depth in 0..D-1
    weights: Tensor,  # [B, Q, P, V, L, G]
) -> Tensor:  # [B, Q, C]
    """Return the same in plain torch: the definition kernels are tested against."""
    B, _, C = features.shape
    _, Q, P, *_ = weights.shape
    D = depth_probs.shape[2]
    out = locations.new_zeros(B, Q, C)
    for camera, (shapes, starts) in enumerate(rows_of_tables(level_shapes, level_starts)):
        location = locations[:, :, :, camera]  # [B, Q, P, 3]
        place, depth = location[..., :2], location[..., 2:]
        is_on_map = ((place > 0) & (place < 1)).all(-1, keepdim=True)  # [B, Q, P, 1]
        counts = is_on_map & (depth > -1) & (depth < D)
        # The volume has D planes between two of zeros, so that D may be 0.
        grid = torch.cat([2 * place - 1, (2 * depth + 3) / (D + 2) - 1], -1)
        grid = torch.where(counts, grid, -3.0).view(B, Q * P, 1, 1, 3)
        for level, ((H, W), start) in enumerate(zip(shapes, starts, strict=True)):
            rows = slice(start, start + H * W)
            volume = torch.einsum("bsc,bsd->bcds", features[:, rows].to(out), depth_probs[:, rows].to(out))
            volume = F.pad(volume, (0, 0, 1, 1)).view(B, C, D + 2, H, W)
            samples = F.grid_sample(volume, grid, padding_mode="zeros", align_corners=False).view(B, C, Q, P)
            out = out + weighted_sum(samples, weights[:, :, :, camera, level], counts)
    return out.to(features)


_deformable_aggregation_with_depth = _registration.differentiable(
    "deformable_aggregation_with_depth",
    "features [B, Q, C]",
    layouts={"features": "[B, S, C]", "locations": "[B, Q, P, V, 3]"},
    elsewhere=deformable_aggregation_with_depth_reference,
)
