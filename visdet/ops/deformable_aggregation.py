"""Deformable aggregation, a weighted sum of bilinear samples of the feature pyramids of several cameras."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _library, _registration
from ._arguments import check_that, integer_table, starts_of, widened
from ._declared import declared
from ._level_tables import rows_of_tables

__all__ = [
    "deformable_aggregation",
    "deformable_aggregation_function",
    "deformable_aggregation_reference",
    "feature_maps_format",
]

# The CUDA kernels take the tables of up to this many maps V * L as an argument.
_MAX_HOST_MAPS = _library.CONSTANTS.get("max_host_maps", 0)


@declared(features="floating", locations="real", weights="real")
def deformable_aggregation(
    features: Tensor,  # [B, S, C]
    level_shapes: Tensor | Sequence[Any],  # [V, L, 2] (height, width)
    level_starts: Tensor | Sequence[Any],  # [V, L]
    locations: Tensor,  # [B, Q, P, V, 2] (x, y) in 0..1
    weights: Tensor,  # [B, Q, P, V, L, G]
) -> Tensor:  # [B, Q, C]
    """Return each query's weighted sum of samples over P points, V cameras and L levels.

    ``out[b, q, c] = sum_{p, v, l} weights[b, q, p, v, l, g] * bilinear(features[b, v, l, c], locations[b, q, p, v])``
    with ``g = c // (C // G)``. A (point, camera) pair counts iff ``0 < x < 1`` and ``0 < y < 1``, strictly, where
    ``grid_sample`` goes on for another half texel. A pair that counts is sampled in every level at pixel
    ``x * W - 0.5``, ``y * H - 0.5``, and a corner outside the map counts as zero. Any other pair, one with a NaN
    coordinate included, contributes nothing, whatever its weight, and has gradients of exactly zero.

    Args:
        features: [B, S, C]. The maps, float64, float32, float16 or bfloat16; the S rows hold them camera by camera and
            level by level.
        level_shapes: [V, L, 2]. The (height, width) of each camera's levels, as a tensor or as nested sequences.
        level_starts: [V, L]. The first row of each map, likewise. The maps must lie within S and must not overlap.
        locations: [B, Q, P, V, 2] (x, y) in 0..1. The points' positions in the images, float32 (float64 for float64
            features). Other types are converted.
        weights: [B, Q, P, V, L, G]. Any numbers, usually a softmax over P * V * L, in float32 (float64) or the type of
            ``features``. Other types are converted to the type of ``locations``. G divides C.

    Returns:
        [B, Q, C]. The sums, in the type of ``features``, accumulated in float32 (float64 for float64). If B, Q, P, V or
        L is 0, the result is empty or zero.

    It is differentiable once with respect to ``features``, ``locations`` and ``weights``. Under autocast every tensor
    keeps its type.

    Level tables on the CPU (or sequences) are checked. On CUDA, tables on the device are read there, without a
    synchronisation, and a map that does not lie within S yields NaN. The forward is deterministic everywhere. The
    backward is so on the CPU, for any number of threads, and on CUDA under
    ``torch.use_deterministic_algorithms(True)``; otherwise the order in which CUDA sums a feature's gradient may change
    between runs. The CUDA backward takes 20 bytes of scratch memory a sample (B * Q * P * V * L; 36 when
    deterministic), and CUDA needs S < 2^30, Q * P * V * L < 2^30, L * G < 2^21 and V * L <= 512.

    Raises:
        RuntimeError: A shape, size or device does not fit. The message names the argument.
        ValueError: A type does not fit. The message names the argument.
        TypeError: ``level_shapes`` or ``level_starts`` is neither a tensor nor nested sequences of integers.
        NotBuiltError: The CPU library is not built.

    Source: Sparse4D, arXiv 2211.10581, and SparseDrive, arXiv 2405.19620; the border rule is that of their kernel.
    """
    shapes, starts = as_tables(features, level_shapes, level_starts)
    locations = widened(locations, features)
    if weights.dtype != features.dtype:
        weights = widened(weights, features)
    return _deformable_aggregation(features, shapes, starts, locations, weights)


def deformable_aggregation_reference(
    features: Tensor,  # [B, S, C]
    level_shapes: Tensor,  # [V, L, 2] (height, width)
    level_starts: Tensor,  # [V, L]
    locations: Tensor,  # [B, Q, P, V, 2] (x, y) in 0..1
    weights: Tensor,  # [B, Q, P, V, L, G]
) -> Tensor:  # [B, Q, C]
    """Return what ``deformable_aggregation`` returns, in plain torch: the definition kernels are tested against."""
    B, _, C = features.shape
    Q = weights.shape[1]
    out = locations.new_zeros(B, Q, C)
    for camera, (shapes, starts) in enumerate(rows_of_tables(level_shapes, level_starts)):
        location = locations[:, :, :, camera]  # [B, Q, P, 2]
        is_visible = ((location > 0) & (location < 1)).all(-1, keepdim=True)  # [B, Q, P, 1]
        grid = torch.where(is_visible, 2 * location - 1, -3.0)
        for level, ((H, W), start) in enumerate(zip(shapes, starts, strict=True)):
            maps = features[:, start : start + H * W].to(out).transpose(1, 2).reshape(B, C, H, W)
            samples = F.grid_sample(maps, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
            out = out + weighted_sum(samples, weights[:, :, :, camera, level], is_visible)
    return out.to(features)


def weighted_sum(samples: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return [B, Q, C] of samples [B, C, Q, P], weights [B, Q, P, G] and whether each counts, [B, Q, P, 1]."""
    C, G = samples.shape[1], weights.shape[-1]
    weights = torch.where(counts, weights.to(samples), 0.0)
    weights = weights.repeat_interleave(C // G, -1) if C else weights[..., :0]
    return (samples.permute(0, 2, 3, 1) * weights).sum(2)


def deformable_aggregation_function(
    feature_maps: Tensor,  # [B, S, C]
    spatial_shape: Tensor,  # [V, L, 2] (height, width)
    scale_start_index: Tensor,  # [V, L]
    sampling_location: Tensor,  # [B, Q, P, V, 2] (x, y) in 0..1
    weights: Tensor,  # [B, Q, P, V, L, G]
) -> Tensor:  # [B, Q, C]
    """Return ``deformable_aggregation`` of the same arguments, under SparseDrive's name and argument names."""
    return deformable_aggregation(feature_maps, spatial_shape, scale_start_index, sampling_location, weights)


def feature_maps_format(feature_maps: Sequence[Any], inverse: bool = False) -> list[Any]:
    """Return feature maps flattened for ``deformable_aggregation``, or with ``inverse`` the maps of flattened ones.

    Args:
        feature_maps: One [B, V, C, H, W] per level, or a list of such lists for groups of cameras of different sizes.
            With ``inverse``, what this function returned: ``[features, level_shapes, level_starts]``.
        inverse: Whether to go back.

    Returns:
        ``[features [B, S, C], level_shapes [V, L, 2], level_starts [V, L]]``. The tables are int64 and on the CPU,
        where the operator wants them, so that nothing synchronises. With ``inverse``, a list that holds one list of
        [B, V, C, H, W] maps for each run of cameras of equal shapes (for one run still a list with one list).

    It is differentiable with respect to the maps.

    Raises:
        ValueError: There are no maps, or they differ in B, V or C, or groups in the number of levels.

    Source: SparseDrive's function of this name, whose tables are on the device of the maps.
    """
    return _unflatten(*feature_maps) if inverse else _flatten(feature_maps)


def _flatten(feature_maps: Sequence[Any]) -> list[Any]:
    op = "feature_maps_format"
    check_that(len(feature_maps) > 0, op, "feature_maps", "hold at least one map", "none")
    groups = [feature_maps] if isinstance(feature_maps[0], Tensor) else feature_maps
    first_group = groups[0]
    L = len(first_group)
    flat, shapes = [], []
    for maps in groups:
        count = len(maps)
        first_map: Any = maps[0] if count else "none"
        are_maps = count > 0 and first_map.dim() == 5
        check_that(are_maps, op, "each level", "be [B, V, C, H, W]", first_map)
        shape = first_map.shape
        B, V, C = shape[:3]
        first_B, _, first_C = first_group[0].shape[:3]
        fits = count == L and first_B == B and first_C == C
        given = f"{count} like {list(shape)}"
        expected = "have {} levels [{}, V, {}, H, W] as the first group has"
        check_that(fits, op, "each group", expected, given, L, first_B, first_C)
        # Maps that have their channels last in memory are read and written in the order in which they lie there.
        flat.append(torch.cat([level.flatten(-2).transpose(-1, -2) for level in maps], -2).flatten(1, 2))
        shapes += [[list(level.shape[-2:]) for level in maps]] * V
    level_shapes = torch.tensor(shapes, dtype=torch.int64, device="cpu")
    level_shapes = level_shapes.view(-1, L, 2)
    level_starts = starts_of(level_shapes.prod(-1).flatten()).view(level_shapes.shape[:2])
    return [torch.cat(flat, 1), level_shapes, level_starts]


def _unflatten(features: Tensor, level_shapes: Tensor, level_starts: Tensor) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = []
    tables = rows_of_tables(level_shapes, level_starts)
    for shapes, cameras in groupby(tables, itemgetter(0)):
        starts = [of_camera for _, of_camera in cameras]
        maps = []
        for level, (H, W) in enumerate(shapes):
            rows = torch.stack([features[:, row[level] : row[level] + H * W] for row in starts], 1)
            maps.append(rows.transpose(-1, -2).unflatten(-1, (H, W)))  # from [B, V, H * W, C]
        groups.append(maps)
    return groups


def as_tables(
    features: Tensor, level_shapes: Tensor | Sequence[Any], level_starts: Tensor | Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """Return the level tables as int64 tensors where the kernels for ``features`` read them.

    Raises:
        TypeError: a table is neither a tensor nor nested sequences of integers.
    """
    device = features.device
    op, expected = "deformable_aggregation", "nested sequences of integers"
    shapes = integer_table(op, "level_shapes", level_shapes, expected, features)
    starts = integer_table(op, "level_starts", level_starts, expected, features)
    if device.type not in ("cuda", "meta"):
        return shapes.cpu(), starts.cpu()
    if shapes.device.type != starts.device.type or shapes.numel() > 2 * _MAX_HOST_MAPS:
        return shapes.to(device), starts.to(device)
    return shapes, starts


_deformable_aggregation = _registration.differentiable(
    "deformable_aggregation",
    "features [B, Q, C]",
    layouts={"features": "[B, S, C]", "locations": "[B, Q, P, V, 2]"},
    elsewhere=deformable_aggregation_reference,
)
