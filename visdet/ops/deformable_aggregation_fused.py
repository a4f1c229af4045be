"""Deformable aggregation that takes the predictions of a head, which are points in space and logits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _registration
from ._arguments import check_that, computation_dtype
from ._declared import declared
from ._library import kernel_device
from .deformable_aggregation import _deformable_aggregation, as_tables, deformable_aggregation_reference

__all__ = ["deformable_aggregation_fused", "deformable_aggregation_fused_reference"]

_MIN_DEPTH = 1e-5  # metres; points nearer or behind a camera land far outside the image


@declared(
    features="floating [B, S, C]",
    key_points="real [B, Q, P, 3]",
    projection="real [B, V, 4, 4]",
    image_wh="None or real [B, V, 2]",
    camera_logits="None or real [B, V, L, P, G]",
    logits="real",
    keep="None or mask [B, Q, V, P]",
    keep_scale="number",
)
def deformable_aggregation_fused(
    features: Tensor,  # [B, S, C]
    level_shapes: Tensor | Sequence[Any],  # [V, L, 2] (height, width)
    level_starts: Tensor | Sequence[Any],  # [V, L]
    key_points: Tensor,  # [B, Q, P, 3]
    projection: Tensor,  # [B, V, 4, 4]
    image_wh: Tensor | None,  # [B, V, 2]
    logits: Tensor,  # [B, Q, V, L, P, G], or [B, Q, L, P, G] with camera_logits
    camera_logits: Tensor | None = None,  # [B, V, L, P, G]
    keep: Tensor | None = None,  # [B, Q, V, P] bool
    keep_scale: float = 1.0,
) -> Tensor:  # [B, Q, C]
    """Return ``deformable_aggregation`` at the projections of 3-D points, with a softmax's weights, in one operator.

    A point is at ``(x / d, y / d) / image_wh`` in a camera, with ``(x, y, d, _) = projection (point, 1)`` and d at
    least 1e-5. The weights of a query's group are ``keep_scale`` times the softmax of its logits over cameras, levels
    and points together. A pair whose ``keep`` is False contributes nothing, but its logits count in the softmax.
    On CUDA neither locations nor weights are saved for the backward, which works them out again from the inputs. On
    the CPU plain torch computes them.

    Args:
        features: [B, S, C]. The maps, as ``deformable_aggregation`` takes them.
        level_shapes: [V, L, 2]. The (height, width) of each camera's levels, as ``deformable_aggregation`` takes them.
        level_starts: [V, L]. The first row of each map, as ``deformable_aggregation`` takes them.
        key_points: [B, Q, P, 3]. The points in metres, float32 (float64 for float64 features). Other types are
            converted.
        projection: [B, V, 4, 4]. The matrices from the points' frame to pixels, on features' device; converted as
            ``key_points``.
        image_wh: [B, V, 2]. The images' (width, height) in pixels, or None if the projection yields coordinates in
            0..1.
        logits: [B, Q, V, L, P, G], or [B, Q, L, P, G] with ``camera_logits``. Any numbers, float32 or of the type of
            ``features``. Other types are converted. The arithmetic is in float32 in any case (float64 for float64
            features).
        camera_logits: [B, V, L, P, G]. The term that each camera adds to the logits of every query. With it, a linear
            layer of ``query + camera`` need not be written out as [B, Q, V, ...]. The type is that of ``logits``.
        keep: [B, Q, V, P] bool. The pairs that attention dropout keeps. None keeps all pairs.
        keep_scale: The factor of the weights, ``1 / (1 - drop)`` under dropout.

    Returns:
        [B, Q, C]. What ``deformable_aggregation`` returns. A point with a coordinate that is not finite contributes
        nothing and has zero gradients.

    It is differentiable once with respect to ``features``, ``key_points``, ``logits`` and ``camera_logits``, and also
    to ``projection`` and ``image_wh``, for which plain torch computes locations and weights on CUDA, too. Determinism,
    autocast and limits are those of ``deformable_aggregation``; on CUDA the backward takes 8 bytes of scratch memory a
    logit more.

    Raises:
        RuntimeError: A size or device does not fit. The message names the argument.
        ValueError: A shape or type does not fit. The message names the argument.
        TypeError: ``level_shapes`` or ``level_starts`` is neither a tensor nor nested sequences of integers.
        NotBuiltError: The CPU library is not built.

    Source: The weights and the projection of Sparse4D v2, arXiv 2305.14018, and SparseDrive, arXiv 2405.19620.
    """
    shapes, starts = as_tables(features, level_shapes, level_starts)
    dtype = computation_dtype(features)
    if image_wh is None:
        image_wh = projection.new_ones(*projection.shape[:2], 2)
    if camera_logits is None:
        camera_logits = logits.new_empty(0)
    if not camera_logits.dtype == logits.dtype == features.dtype:
        logits, camera_logits = logits.to(dtype), camera_logits.to(dtype)
    keep = features.new_empty(0, dtype=torch.bool) if keep is None else keep.bool()
    points, matrices, sizes = (tensor.to(dtype) for tensor in (key_points, projection, image_wh))
    given = matrices, sizes, logits, camera_logits, keep, keep_scale
    is_calibrating = torch.is_grad_enabled() and (matrices.requires_grad or sizes.requires_grad)
    if kernel_device(features) in ("cuda", "meta") and not is_calibrating:
        return _deformable_aggregation_fused(features, shapes, starts, points, *given)
    B, Q, P, _ = points.shape
    shape = logits.shape
    expected = [B, Q, projection.shape[1], *shape[-3:-2], P, *shape[-1:]]
    if camera_logits.dim() == 5:
        expected = [B, Q, *camera_logits.shape[2:]]
    fits = list(shape) == expected
    check_that(fits, "deformable_aggregation_fused", "logits", "be {}", logits, expected)
    is_finite = points.isfinite().all(-1)[..., None]
    locations, weights = locations_and_weights(torch.where(is_finite, points, 0), *given)
    locations = torch.where(is_finite[..., None], locations, -1.0)
    return _deformable_aggregation(features, shapes, starts, locations, weights)


def deformable_aggregation_fused_reference(
    features: Tensor,  # [B, S, C]
    level_shapes: Tensor,  # [V, L, 2] (height, width)
    level_starts: Tensor,  # [V, L]
    key_points: Tensor,  # [B, Q, P, 3]
    projection: Tensor,  # [B, V, 4, 4]
    image_wh: Tensor,  # [B, V, 2]
    logits: Tensor,  # [B, Q, V, L, P, G], or [B, Q, L, P, G] with camera_logits
    camera_logits: Tensor,  # [B, V, L, P, G] or [0]
    keep: Tensor,  # [B, Q, V, P] or [0]
    keep_scale: float = 1.0,
) -> Tensor:  # [B, Q, C]
    """Return what ``deformable_aggregation_fused`` returns, in plain torch: the definition for the kernels."""
    geometry = (key_points, projection, image_wh, logits, camera_logits, keep, keep_scale)
    return deformable_aggregation_reference(
        features, level_shapes, level_starts, *locations_and_weights(*geometry)
    )


def locations_and_weights(
    key_points: Tensor,  # [B, Q, P, 3]
    projection: Tensor,  # [B, V, 4, 4]
    image_wh: Tensor,  # [B, V, 2]
    logits: Tensor,  # [B, Q, V, L, P, G], or [B, Q, L, P, G] with camera_logits
    camera_logits: Tensor,  # [B, V, L, P, G] or [0]
    keep: Tensor,  # [B, Q, V, P] or [0]
    keep_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return locations [B, Q, P, V, 2] and weights [B, Q, P, V, L, G]."""
    matrix = projection[:, :, None, None]  # [B, V, 1, 1, 4, 4]
    pixels = (matrix[..., :3, :3] * key_points[:, None, :, :, None, :]).sum(-1) + matrix[..., :3, 3]
    locations = pixels[..., :2] / pixels[..., 2:].clamp(min=_MIN_DEPTH) / image_wh[:, :, None, None]
    if keep.dim() == 4:
        locations = torch.where(keep.transpose(1, 2)[..., None], locations, -1.0)
    summed = logits.to(key_points)
    if camera_logits.dim() == 5:
        summed = summed[:, :, None] + camera_logits.to(key_points)[:, None]
    # Some runtimes need a softmax over the last axis.
    ordered = summed.movedim(-1, 2)  # [B, Q, G, V, L, P]
    weights = ordered.flatten(3).softmax(-1).view(ordered.shape) * keep_scale
    return locations.permute(0, 2, 3, 1, 4), weights.permute(0, 1, 5, 3, 4, 2)


_deformable_aggregation_fused = _registration.differentiable(
    "deformable_aggregation_fused",
    "features [B, Q, C]",
    layouts={"features": "[B, S, C]", "key_points": "[B, Q, P, 3]"},
)
