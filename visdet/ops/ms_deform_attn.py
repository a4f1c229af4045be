"""Multi-scale deformable attention: a weighted sum of bilinear samples from a flattened feature pyramid."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _library

__all__ = [
    "ms_deform_attn",
    "ms_deform_attn_fused",
    "ms_deform_attn_fused_reference",
    "ms_deform_attn_reference",
]

# Levels that travel with a CUDA launch; a longer table is read from the device (kMaxHostLevels in
# cuda/ms_deform_attn.cuh).
MAX_HOST_LEVELS = 16


def ms_deform_attn(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Tensor | Sequence[Sequence[int]],  # [L, 2] (height, width)
    level_starts: Tensor | Sequence[int] | None,  # [L]
    locations: Tensor,  # [B, Q, G, L, P, 2] (x, y) in 0..1
    weights: Tensor,  # [B, Q, G, L, P]
    im2col_step: int | None = None,
) -> Tensor:  # [B, Q, G * C]
    """Return each query's and head's weighted sum of L * P bilinear samples of ``value``.

    ``out[b, q, g] = sum_{l, p} weights[b, q, g, l, p] * bilinear(value[b, l, g], locations[b, q, g, l, p])``

    Pixel coordinates are ``x = loc_x * W - 0.5``, ``y = loc_y * H - 0.5``. A sample counts iff
    ``-1 < x < W`` and ``-1 < y < H``; a corner outside the map counts as zero (``grid_sample`` of ``2 * loc - 1``:
    bilinear, zeros, align_corners=False). A sample with a NaN or infinite coordinate contributes nothing,
    whatever its weight, and has zero gradients. On CUDA a corner outside stands for a texel inside with weight zero, so
    a NaN or infinite number of ``value`` may reach samples beside the map, and one of the output's gradient or of a
    weight the gradients of texels beside its own. The CPU does not read these texels.

    Args:
        value: float64, float32, float16 or bfloat16, channels last; the levels one after another, S = sum
            of H_l * W_l.
        level_shapes: (height, width) of each level: a sequence, or a tensor on the CPU or on ``value``'s device.
        level_starts: first row of each level, likewise, on the same device as ``level_shapes`` or not; None for
            levels without gaps. What is on the CPU is checked against S and travels with the launch. What is on a
            GPU is read there without a synchronisation, and a level that does not lie within S then yields NaN.
        locations: float32 (float64 for float64 values); other types are converted.
        weights: any numbers, usually a softmax over L * P; type as ``locations``.
        im2col_step: ignored; accepted because mmcv's function takes it last. B need not divide by anything.

    Returns:
        The sums, in the type of ``value``, accumulated in float32 (float64 for float64). B, Q, P or C of 0
        give an empty or zero result.

    Differentiable once with respect to ``value``, ``locations`` and ``weights``. Deterministic on the CPU
    for any number of threads. On CUDA the forward is; the gradient of ``value`` is under
    ``torch.use_deterministic_algorithms(True)``. Under autocast every tensor keeps its type: coordinates
    and weights are never rounded to 16 bits here.

    On CUDA an image's Q * G * L * P must be under 2^31, G * C under 2^28, S and B * G under 2^31, and in the backward
    Q times P rounded up to a power of two under 2^31. The backward takes scratch memory: 32 bytes a sample
    (64 in float64). Few samples, and an encoder's (Q = S), take instead a float32 copy of a 16-bit gradient of
    ``value``, the encoder's also 4 bytes a query; not in deterministic mode.

    Raises:
        RuntimeError: a shape, type, size or device does not fit; the message names the argument.
        TypeError: ``level_shapes`` or ``level_starts`` is neither a tensor nor a sequence of integers.
        NotBuiltError: the library for ``value``'s device is not built.

    Source: Deformable DETR, arXiv 2010.04159, eq. 3; the signature is mmcv's.
    """
    shapes, starts = _level_tables(value, level_shapes, level_starts)
    for name, tensor in (("locations", locations), ("weights", weights)):
        _check_device("ms_deform_attn", name, tensor, value)
    coordinate_dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    locations = locations.to(coordinate_dtype)
    weights = weights.to(coordinate_dtype)
    if value.device.type not in ("cpu", "cuda", "meta"):
        return ms_deform_attn_reference(value, shapes, starts, locations, weights)
    return _ms_deform_attn(value, shapes, starts, locations, weights)


def ms_deform_attn_reference(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Tensor,  # [L, 2] (height, width)
    level_starts: Tensor,  # [L]
    locations: Tensor,  # [B, Q, G, L, P, 2] (x, y) in 0..1
    weights: Tensor,  # [B, Q, G, L, P]
) -> Tensor:  # [B, Q, G * C]
    """Return what ``ms_deform_attn`` returns, in plain torch: the definition kernels are tested against."""
    B, _, G, C = value.shape
    _, Q, _, _, P, _ = locations.shape
    out = torch.zeros(B, G, C, Q, dtype=locations.dtype, device=value.device)
    for level, ((H, W), start) in enumerate(zip(level_shapes.tolist(), level_starts.tolist(), strict=True)):
        location = locations[:, :, :, level]  # [B, Q, G, P, 2]
        x, y = location[..., 0] * W - 0.5, location[..., 1] * H - 0.5
        counts = (x > -1) & (x < W) & (y > -1) & (y < H)
        grid = torch.where(counts[..., None], 2 * location - 1, -3.0).transpose(1, 2).reshape(B * G, Q, P, 2)
        weight = torch.where(counts, weights[:, :, :, level], 0.0).transpose(1, 2).reshape(B * G, 1, Q, P)
        maps = value[:, start : start + H * W].to(out.dtype).permute(0, 2, 3, 1).reshape(B * G, C, H, W)
        samples = F.grid_sample(maps, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        out = out + (samples * weight).sum(-1).view(B, G, C, Q)
    return out.permute(0, 3, 1, 2).reshape(B, Q, G * C).to(value.dtype)


def ms_deform_attn_fused(
    value: Tensor,  # [B, S, G, C]
    level_shapes: Tensor | Sequence[Sequence[int]],  # [L, 2] (height, width)
    level_starts: Tensor | Sequence[int] | None,  # [L]
    reference_points: Tensor,  # [B or 1, Q, L or 1, 2 or 4] (x, y) or (cx, cy, w, h) in 0..1
    offsets: Tensor,  # [B, Q, G, K, 2] (x, y)
    logits: Tensor,  # [B, Q, G, K]
    num_points: int | Sequence[int],  # samples on each level, or on every one
) -> Tensor:  # [B, Q, G * C]
    """Return ``ms_deform_attn`` of what a detector's linear layers predict, in one operator.

    A row's K = sum of ``num_points`` samples stand level after level. Their weights are the softmax of ``logits``
    over K; their locations are ``(x, y) + offset / (W, H)`` of the level for reference points, in pixels, and
    ``(cx, cy) + offset * (w, h) * 0.5 / P`` for reference boxes, P being the samples of that level. Neither is
    ever written to memory: the backward works them out again from the inputs, which are all it keeps.

    Args:
        value: as for ``ms_deform_attn``, and so are ``level_shapes`` and ``level_starts``.
        reference_points: float32 (float64 for float64 values); other types are converted. Of size 1 where one
            serves every batch entry or level.
        offsets: float32 or the type of ``value``, in which autocast leaves them; other types are converted.
            The arithmetic is in float32 in any case (float64 for float64 values).
        logits: any numbers; type as ``offsets``. -inf gives a sample the weight zero; a row of -inf or one with a
            NaN is NaN where a sample of it counts, as with ``torch.softmax``.
        num_points: one number for every level, or a sequence of one for each (D-FINE has [3, 6, 3]).

    Returns:
        What ``ms_deform_attn`` returns. A sample whose position is not finite contributes nothing, and gives
        ``offsets`` and ``reference_points`` zero gradients.

    Differentiable once with respect to ``value``, ``reference_points``, ``offsets`` and ``logits``. Everything
    else (determinism, autocast, limits) is as for ``ms_deform_attn``; the backward on CUDA takes 16 bytes a sample
    and 8 a row more of scratch. More than 16 levels on CUDA, and devices without kernels, take the path of
    separate operators.

    Raises:
        RuntimeError: a shape, type, size or device does not fit; the message names the argument.
        TypeError: ``level_shapes`` or ``level_starts`` is neither a tensor nor a sequence of integers.
        NotBuiltError: the library for ``value``'s device is not built.

    Source: Deformable DETR, arXiv 2010.04159, eq. 2 and appendix A.4; the division by the samples of each level is
    D-FINE's (arXiv 2410.13842) and the same as theirs where the levels have equally many.
    """
    for name, tensor in (("offsets", offsets), ("logits", logits)):
        _check_device("ms_deform_attn_fused", name, tensor, value)
    shapes, starts, reference_points, points = fused_geometry(
        value, level_shapes, level_starts, reference_points, num_points
    )
    if not offsets.dtype == logits.dtype == value.dtype:
        offsets, logits = offsets.to(reference_points.dtype), logits.to(reference_points.dtype)
    if not has_fused_kernel(value, shapes):
        return ms_deform_attn(
            value, shapes, starts, *_compose(shapes, reference_points, offsets, logits, points)
        )
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
    composed = _compose(level_shapes, reference_points, offsets, logits, num_points)
    return ms_deform_attn_reference(value, level_shapes, level_starts, *composed)


def _compose(
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
    weights = logits.to(dtype).softmax(-1)
    P = max(num_points, default=0)
    level_locations, level_weights = [], []
    offsets_of, weights_of = offsets.to(dtype).split(num_points, 3), weights.split(num_points, 3)
    for level, count in enumerate(num_points):
        if sizes.shape[-1]:
            scale = (sizes[:, :, level] * (0.5 / max(count, 1)))[:, :, None, None]
        else:
            scale = level_shapes[level].flip(0).to(centers).reciprocal()
        location = centers[:, :, level, None, None] + offsets_of[level] * scale
        level_locations.append(F.pad(location, (0, 0, 0, P - count)))
        level_weights.append(F.pad(weights_of[level], (0, P - count)))
    if not num_points:
        return offsets.to(dtype)[:, :, :, None], weights[:, :, :, None]
    return torch.stack(level_locations, 3), torch.stack(level_weights, 3)


def fused_geometry(
    value: Tensor,  # [B, ...]
    level_shapes: Tensor | Sequence[Sequence[int]],
    level_starts: Tensor | Sequence[int] | None,
    reference_points: Tensor,
    num_points: int | Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return these arguments of ``ms_deform_attn_fused`` as its kernels take them."""
    _check_device("ms_deform_attn_fused", "reference_points", reference_points, value)
    shapes, starts = _level_tables(value, level_shapes, level_starts)
    L = shapes.shape[0] if shapes.dim() else 0
    # Before it is expanded, so that the gradients of batch entries and levels are summed in this type.
    reference_points = reference_points.to(torch.float64 if value.dtype == torch.float64 else torch.float32)
    if reference_points.dim() == 4:
        try:
            reference_points = reference_points.expand(value.shape[0], -1, L, -1)
        except RuntimeError as error:
            raise RuntimeError(
                f"ms_deform_attn_fused: reference_points must be [B or 1, Q, L or 1, 2 or 4] with B = {value.shape[0]} "
                f"as in value and L = {L}, got {tuple(reference_points.shape)}"
            ) from error
    return (
        shapes,
        starts,
        reference_points,
        [num_points] * L if isinstance(num_points, int) else list(num_points),
    )


def has_fused_kernel(value: Tensor, level_shapes: Tensor) -> bool:
    """Return whether ``ms_deform_attn_fused`` has a kernel for the device of ``value`` and so many levels."""
    if value.is_cuda:
        return level_shapes.shape[:1].numel() <= MAX_HOST_LEVELS
    return value.device.type in ("cpu", "meta")


def level_starts_of(level_shapes: Tensor) -> Tensor:
    """Return the first row [L] of each level [L, 2] (height, width) of a flattened pyramid without gaps."""
    areas = level_shapes.prod(1)
    return areas.cumsum(0) - areas


def _level_tables(
    value: Tensor,
    level_shapes: Tensor | Sequence[Sequence[int]],
    level_starts: Tensor | Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """Return both tables as int64 tensors that a kernel for ``value`` can read, each on the CPU or on its device."""
    shapes = _as_int64(level_shapes, "level_shapes")
    starts = level_starts_of(shapes) if level_starts is None else _as_int64(level_starts, "level_starts")
    if value.is_cuda:
        if shapes.shape[:1].numel() > MAX_HOST_LEVELS:
            shapes = shapes.to(value.device, non_blocking=True)
            starts = starts.to(value.device, non_blocking=True)
    elif value.device.type == "cpu":
        shapes, starts = shapes.to("cpu"), starts.to("cpu")
    return shapes, starts


def _check_device(operator: str, name: str, tensor: Tensor, value: Tensor) -> None:
    if tensor.device != value.device:
        raise RuntimeError(
            f"{operator}: {name} must be on value's device {value.device}, got {tensor.device}"
        )


def _as_int64(levels: Any, name: str) -> Tensor:
    if isinstance(levels, Tensor):
        return levels.to(torch.int64)
    try:
        return torch.tensor(levels, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"ms_deform_attn: {name} must be an integer tensor or a sequence of integers, got {levels!r}"
        ) from error


def _fake(
    value: Tensor, level_shapes: Tensor, level_starts: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    torch._check(
        value.dim() == 4, lambda: f"ms_deform_attn: value must be [B, S, G, C], got {tuple(value.shape)}"
    )
    torch._check(
        locations.dim() == 6,
        lambda: f"ms_deform_attn: locations must be [B, Q, G, L, P, 2], got {tuple(locations.shape)}",
    )
    return value.new_empty(value.shape[0], locations.shape[1], value.shape[2] * value.shape[3])


def _fake_backward(
    grad_output: Tensor,
    value: Tensor,
    level_shapes: Tensor,
    level_starts: Tensor,
    locations: Tensor,
    weights: Tensor,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        value.new_empty(value.shape),
        locations.new_empty(locations.shape),
        weights.new_empty(weights.shape),
    )


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    value, level_shapes, level_starts, locations, weights = ctx.saved_tensors
    grad_value, grad_locations, grad_weights = torch.ops.visdet.ms_deform_attn_backward.default(
        grad_output,
        value,
        level_shapes,
        level_starts,
        locations,
        weights,
        torch.are_deterministic_algorithms_enabled(),
    )
    return grad_value, None, None, grad_locations, grad_weights


def _fused_fake(
    value: Tensor,
    level_shapes: Tensor,
    level_starts: Tensor,
    reference_points: Tensor,
    offsets: Tensor,
    logits: Tensor,
    num_points: Sequence[int],
) -> Tensor:
    torch._check(
        value.dim() == 4,
        lambda: f"ms_deform_attn_fused: value must be [B, S, G, C], got {tuple(value.shape)}",
    )
    torch._check(
        offsets.dim() == 5,
        lambda: f"ms_deform_attn_fused: offsets must be [B, Q, G, K, 2], got {tuple(offsets.shape)}",
    )
    return value.new_empty(value.shape[0], offsets.shape[1], value.shape[2] * value.shape[3])


def _fused_fake_backward(
    grad_output: Tensor,
    value: Tensor,
    level_shapes: Tensor,
    level_starts: Tensor,
    reference_points: Tensor,
    offsets: Tensor,
    logits: Tensor,
    num_points: Sequence[int],
    needs_reference: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        value.new_empty(value.shape),
        reference_points.new_empty(reference_points.shape if needs_reference else (0,)),
        offsets.new_empty(offsets.shape),
        logits.new_empty(logits.shape),
    )


def _fused_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-1])
    ctx.num_points = inputs[-1]


def _fused_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    needs_reference = ctx.needs_input_grad[3]
    grad_value, grad_reference, grad_offsets, grad_logits = (
        torch.ops.visdet.ms_deform_attn_fused_backward.default(
            grad_output,
            *ctx.saved_tensors,
            ctx.num_points,
            needs_reference,
            torch.are_deterministic_algorithms_enabled(),
        )
    )
    return (
        grad_value,
        None,
        None,
        grad_reference if needs_reference else None,
        grad_offsets,
        grad_logits,
        None,
    )


_ms_deform_attn = _library.differentiable(
    "ms_deform_attn",
    fake=_fake,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
)
_ms_deform_attn_fused = _library.differentiable(
    "ms_deform_attn_fused",
    fake=_fused_fake,
    fake_backward=_fused_fake_backward,
    setup_context=_fused_setup_context,
    backward=_fused_backward,
)
