"""Multi-scale deformable attention that takes the predictions of a detector, which are offsets and logits."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _registration
from ._arguments import widened
from ._declared import declared
from ._level_tables import MAX_HOST_LEVELS, level_tables
from .ms_deform_attn import ms_deform_attn, ms_deform_attn_reference

__all__ = ["ms_deform_attn_fused", "ms_deform_attn_fused_reference"]


@declared(
    value="floating",
    reference_points="real",
    offsets="real",
    logits="real",
    num_points="1 or L integers, at least 0",
)
def ms_deform_attn_fused(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Tensor | Sequence[Sequence[int]],  # [L, 2] (height, width)
    level_starts: Tensor | Sequence[int] | None,  # [L]
    reference_points: Tensor,  # [B or 1, Q, L or 1, 2 or 4] (x, y) or (cx, cy, w, h) in 0..1
    offsets: Tensor,  # [B, Q, G, K, 2] (x, y)
    logits: Tensor,  # [B, Q, G, K]
    num_points: int | Sequence[int],  # number of samples, one for all levels or one for each
) -> Tensor:  # [B, Q, G * C]
    """Return ``ms_deform_attn`` of what a detector's linear layers predict, in one operator.

    The K = sum of ``num_points`` samples of a query and head stand level after level. Their weights are the softmax of
    ``logits`` over K. Their locations are ``(x, y) + offset / (W, H)`` of the level where reference points are given,
    so that offsets are in pixels, and ``(cx, cy) + offset * (w, h) * 0.5 / P`` where reference boxes are given, with P
    the number of samples on that level. Neither weights nor locations are ever written to memory: the backward works
    them out again from the inputs, which are all that is saved for it. Reference points that serve
    several levels or images are saved as the copy that the kernels read.

    Args:
        value: [B, S, G, C]. The maps, as ``ms_deform_attn`` takes them.
        level_shapes: [L, 2]. The (height, width) of each level, as ``ms_deform_attn`` takes them.
        level_starts: [L]. The first row of each level, as ``ms_deform_attn`` takes them.
        reference_points: [B or 1, Q, L or 1, 2 or 4]. Points (x, y) or boxes (cx, cy, w, h) in 0..1, float32 (float64
            for float64 values). Other types are converted. A dimension of size 1 serves every batch entry or level.
        offsets: [B, Q, G, K, 2]. The samples' offsets (x, y), float32 or of the type of ``value``, in which autocast
            leaves them. Other types are converted. The arithmetic is in float32 in any case (float64 for float64
            values).
        logits: [B, Q, G, K]. Any numbers, of the type of ``offsets``. -inf gives a sample the weight zero. A row that
            holds only -inf or a NaN is NaN where one of its samples counts, as with ``torch.softmax``.
        num_points: The number of samples on every level, or a sequence of one number for each (D-FINE has [3, 6, 3]).

    Returns:
        [B, Q, G * C]. What ``ms_deform_attn`` returns. A sample whose position is not finite contributes nothing and
        gives ``offsets`` and ``reference_points`` zero gradients.

    It is differentiable once with respect to ``value``, ``reference_points``, ``offsets`` and ``logits``. Determinism,
    autocast and limits are those of ``ms_deform_attn``; on CUDA the backward takes 16 bytes of scratch memory a sample
    and 8 a row more. More than 16 levels on CUDA, and devices without kernels, are served by separate operators.

    Raises:
        RuntimeError: A shape, size or device does not fit. The message names the argument.
        ValueError: A type does not fit. The message names the argument.
        TypeError: ``level_shapes`` or ``level_starts`` is neither a tensor nor a sequence of integers.
        NotBuiltError: The library for ``value``'s device is not built.

    Source: Deformable DETR, arXiv 2010.04159, eq. 2 and appendix A.4. The division by the samples of each level is
    D-FINE's (arXiv 2410.13842), and the same as theirs where the levels have equally many.
    """
    shapes, starts = level_tables(value, level_shapes, level_starts)
    B, L = value.shape[0], shapes.shape[0]
    # The conversion comes before the expansion: so the gradients of batch entries and levels are summed in this type.
    reference_points = widened(reference_points, value)
    if reference_points.dim() == 4:
        if reference_points.shape[0] not in (1, B) or reference_points.shape[2] not in (1, L):
            raise RuntimeError(
                f"ms_deform_attn_fused: reference_points must be [B or 1, Q, L or 1, 2 or 4] with B = {B} as in value "
                f"and L = {L}, got {tuple(reference_points.shape)}"
            )
        # One copy of expanded points serves the forward and the backward. The kernels would make one for each.
        reference_points = reference_points.expand(B, -1, L, -1).contiguous()
    points = [num_points] * L if isinstance(num_points, int) else num_points
    if not offsets.dtype == logits.dtype == value.dtype:
        offsets, logits = offsets.to(reference_points), logits.to(reference_points)
    if value.is_cuda and L > MAX_HOST_LEVELS:
        composed = locations_and_weights(shapes, reference_points, offsets, logits, points)
        return ms_deform_attn(value, shapes, starts, *composed)
    return _ms_deform_attn_fused(value, shapes, starts, reference_points, offsets, logits, points)


def ms_deform_attn_fused_reference(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Tensor,  # [L, 2] (height, width)
    level_starts: Tensor,  # [L]
    reference_points: Tensor,  # [B, Q, L, 2 or 4]
    offsets: Tensor,  # [B, Q, G, K, 2]
    logits: Tensor,  # [B, Q, G, K]
    num_points: Sequence[int],  # [L]
) -> Tensor:  # [B, Q, G * C]
    """Return what ``ms_deform_attn_fused`` returns, in plain torch: the definition kernels are tested against."""
    composed = locations_and_weights(level_shapes, reference_points, offsets, logits, num_points)
    return ms_deform_attn_reference(value, level_shapes, level_starts, *composed)


def locations_and_weights(
    level_shapes: Tensor,  # [L, 2]
    reference_points: Tensor,  # [B, Q, L, 2 or 4]
    offsets: Tensor,  # [B, Q, G, K, 2]
    logits: Tensor,  # [B, Q, G, K]
    num_points: Sequence[int],  # [L]
) -> tuple[Tensor, Tensor]:
    """Return locations [B, Q, G, L, P, 2] and weights [B, Q, G, L, P], P the most samples of any level.

    A level with fewer samples is filled up with samples of weight zero.
    """
    dtype = reference_points.dtype
    centers, sizes = reference_points[..., :2], reference_points[..., 2:]  # [B, Q, L, 2], [B, Q, L, 0 or 2]
    offsets, weights = offsets.to(dtype), logits.to(dtype).softmax(-1)
    P = max(num_points, default=0)
    level_locations, level_weights = [], []
    offsets_of, weights_of = offsets.split(num_points, 3), weights.split(num_points, 3)
    for level, count in enumerate(num_points):
        if sizes.shape[-1]:
            scale = (sizes[:, :, level] * (0.5 / max(count, 1)))[:, :, None, None]
        else:
            scale = level_shapes[level].flip(0).to(centers).reciprocal()
        location = centers[:, :, level, None, None] + offsets_of[level] * scale
        level_locations.append(F.pad(location, (0, 0, 0, P - count)))
        level_weights.append(F.pad(weights_of[level], (0, P - count)))
    if not num_points:
        return offsets[:, :, :, None], weights[:, :, :, None]
    return torch.stack(level_locations, 3), torch.stack(level_weights, 3)


_ms_deform_attn_fused = _registration.differentiable(
    "ms_deform_attn_fused",
    "value [B, Q, G * C]",
    layouts={"value": "[B, S, G, C]", "offsets": "[B, Q, G, K, 2]"},
    elsewhere=ms_deform_attn_fused_reference,
)
