"""Multi-scale deformable attention with its four linear layers, as one node of the autograd graph."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._library import declares
from .ms_deform_attn_fused import fused_geometry, has_fused_kernel
from .tracing import is_traced

__all__ = ["ms_deform_attn_projected"]


def ms_deform_attn_projected(
    query: Tensor,  # [B, Q, channels]
    value: Tensor,  # [B, S, channels]
    identity: Tensor | None,  # [B, Q, channels of the output]
    key_padding_mask: Tensor | None,  # [B, S], True where a row of value counts as zero
    level_shapes: Tensor,  # [L, 2] (height, width)
    level_starts: Tensor | None,  # [L]
    reference_points: Tensor,  # [B or 1, Q, L or 1, 2 or 4]
    num_points: Sequence[int],  # [L]
    num_heads: int,
    parameters: Sequence[Tensor],  # weight and bias of the layers of offsets, logits, value and output
) -> Tensor | None:  # [B, Q, channels of the output]
    """Return ``ms_deform_attn_fused`` of what linear layers predict, projected, plus ``identity``; or None.

    The same numbers as from separate calls, in autocast's type where it is on, with fewer launches: one node of the
    autograd graph instead of some thirty. Gradients of float32 tensors leave their products in float32, without being
    rounded to autocast's type and converted, and those of biases come from one kernel. Differentiable once.

    None where this has no gain or no way: without gradients, under ``torch.compile``, exports, traces and
    ``torch.func``; where types differ (but for what autocast converts); for devices and numbers of levels without a
    kernel; and where shapes or devices do not fit, of which separate layers say more.

    Raises:
        OutOfMemoryError: the GPU has not enough memory (a RuntimeError before torch 2.13, where the reason is printed).
        RuntimeError: a kernel could not run.
    """
    kind, dtype, converted = query.device.type, query.dtype, None
    if not _is_built or kind not in ("cpu", "cuda") or is_traced() or not torch.is_grad_enabled():
        return None
    if dtype != torch.float64 and torch.is_autocast_enabled(kind):
        dtype, converted = torch.get_autocast_dtype(kind), torch.float32
    if not all(tensor.dtype in (dtype, converted) for tensor in (query, value, *parameters)):
        return None
    shapes, starts, reference_points, points = fused_geometry(
        value, level_shapes, level_starts, reference_points, num_points
    )
    if not has_fused_kernel(value, shapes):
        return None
    inputs = identity, reference_points, query, value, *parameters
    geometry = shapes, starts, key_padding_mask, identity, reference_points
    if not _fit(num_heads, points, *geometry, query, value, parameters):
        return None
    try:
        return _Projected.apply(dtype, num_heads, points, shapes, starts, key_padding_mask, *inputs)
    except RuntimeError as error:
        # Errors that come back from C++ have lost their type.
        if "out of memory" in str(error) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def _fit(
    num_heads: int,
    num_points: list[int],
    level_shapes: Tensor,
    level_starts: Tensor,
    key_padding_mask: Tensor | None,
    identity: Tensor | None,
    reference_points: Tensor,
    query: Tensor,
    value: Tensor,
    parameters: Sequence[Tensor],
) -> bool:
    """Return whether the shapes and devices are what the operator takes."""
    others = [reference_points, value, *parameters]
    others += [tensor for tensor in (key_padding_mask, identity) if tensor is not None]
    if any(tensor.device != query.device for tensor in others):
        return False
    if query.dim() != 3 or value.dim() != 3 or query.shape[0] != value.shape[0] or num_heads < 1:
        return False
    (B, Q, columns), (_, S, value_columns) = query.shape, value.shape
    L, samples = len(num_points), num_heads * sum(num_points)
    if level_shapes.shape != (L, 2) or level_starts.shape != (L,):
        return False
    if reference_points.dim() != 4 or reference_points.shape[:3] != (B, Q, L):
        return False
    if key_padding_mask is not None and (
        key_padding_mask.shape != (B, S) or key_padding_mask.dtype != torch.bool
    ):
        return False
    if len(parameters) != 8 or any(tensor.dim() == 0 for tensor in parameters):
        return False
    channels, out = parameters[4].shape[0], parameters[6].shape[0]
    if identity is not None and identity.shape != (B, Q, out):
        return False
    widths = [(2 * samples, columns), (samples, columns), (channels, value_columns), (out, channels)]
    if channels % num_heads != 0:
        return False
    if any(
        weight.shape != width or bias.shape != width[:1]
        for weight, bias, width in zip(parameters[::2], parameters[1::2], widths, strict=True)
    ):
        return False
    return _levels_fit(level_shapes, level_starts, S)


def _levels_fit(level_shapes: Tensor, level_starts: Tensor, S: int) -> bool:
    """Return whether tables on the CPU name levels within the S rows of value."""
    if level_shapes.device.type != "cpu" or level_starts.device.type != "cpu":
        return True  # read on the device, where a level that does not fit gives NaN
    shapes, starts = level_shapes.tolist(), level_starts.tolist()
    return sum(height * width for height, width in shapes) == S and all(
        min(height, width) > 0 and 0 <= start <= S - height * width
        for (height, width), start in zip(shapes, starts, strict=True)
    )


class _Projected(torch.autograd.Function):
    """One call of C++ forward and one backward (csrc/ms_deform_attn_projected.cpp)."""

    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype,
        num_heads: int,
        num_points: list[int],
        level_shapes: Tensor,
        level_starts: Tensor,
        key_padding_mask: Tensor | None,
        identity: Tensor | None,
        *differentiable: Tensor,  # reference points, query, value, parameters
    ) -> Tensor:
        reference_points, query, value, *parameters = differentiable
        geometry = key_padding_mask, level_shapes, level_starts, reference_points
        with torch._C._AutoDispatchBelowAutograd():
            output, *saved = torch.ops.visdet.ms_deform_attn_projected.default(
                query, value, identity, *geometry, num_points, num_heads, parameters, dtype
            )
        ctx.save_for_backward(*geometry, *saved)
        ctx.numbers = num_points, num_heads
        ctx.kinds = [1 if tensor.dtype == dtype else 2 for tensor in differentiable]
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        mask, shapes, starts, reference_points, *saved = ctx.saved_tensors
        of_identity, *needs = ctx.needs_input_grad[6:]
        wanted = [kind if needed else 0 for kind, needed in zip(ctx.kinds, needs, strict=True)]
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        grads = iter(
            torch.ops.visdet.ms_deform_attn_projected_backward.default(
                grad_output,
                saved,
                mask,
                shapes,
                starts,
                reference_points,
                *ctx.numbers,
                wanted,
                is_deterministic,
            )
        )
        return (
            *[None] * 6,
            grad_output if of_identity else None,
            *(next(grads) if needed else None for needed in needs),
        )


_is_built = declares("ms_deform_attn_projected")
