"""Multi-scale deformable attention with its four linear layers, as one node of the autograd graph."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._library import declares, differentiable_once
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
    """Return the projected ``ms_deform_attn_fused`` of the predictions of linear layers plus ``identity``, or None.

    The numbers are those of separate calls, in autocast's type where autocast is on, with fewer launches: one node of
    the autograd graph instead of some thirty. Gradients of float32 tensors leave their products in float32, without
    being rounded to autocast's type and converted, and one kernel sums those of the biases. Differentiable once.

    The result is None where the caller has to call the layers one by one. That is so without gradients; under
    ``torch.compile``, exports, traces and ``torch.func``; where types differ from what autocast or the query has; where
    the device has no kernel for so many levels; and where a shape or a device does not fit, because the layers report
    that better. All of this is decided before the operator is called, from sizes and types alone.

    Raises:
        OutOfMemoryError: The GPU has not enough memory, in the forward or in the backward (before torch 2.13, whose
            errors do not say why a call from C++ failed, this is a RuntimeError).
        RuntimeError: ``reference_points`` do not fit ``value`` and the levels, or a kernel could not run.
        TypeError: ``level_shapes`` or ``level_starts`` is no table of integers.
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
    geometry = (num_heads, points, shapes, starts, key_padding_mask)
    call = _Call(*geometry, identity, reference_points, query, value, parameters)
    if not _fits(call):
        return None
    return _Projected.apply(dtype, *call[:-1], *parameters)


class _Call(NamedTuple):
    """The arguments in the form that the node of the graph takes. Those that it differentiates are at the end."""

    num_heads: int
    num_points: list[int]  # [L]
    level_shapes: Tensor
    level_starts: Tensor
    key_padding_mask: Tensor | None
    identity: Tensor | None
    reference_points: Tensor  # [B, Q, L, 2 or 4]
    query: Tensor
    value: Tensor
    parameters: Sequence[Tensor]


def _fits(call: _Call) -> bool:
    """Return whether the operator supports these shapes, devices and levels."""
    query, value, L = call.query, call.value, len(call.num_points)
    tensors = (call.reference_points, value, *call.parameters, call.key_padding_mask, call.identity)
    if any(tensor is not None and tensor.device != query.device for tensor in tensors):
        return False
    if query.dim() != 3 or value.dim() != 3 or query.shape[0] != value.shape[0]:
        return False
    (B, Q, _), S = query.shape, value.shape[1]
    if call.level_shapes.shape != (L, 2) or call.level_starts.shape != (L,):
        return False
    if call.reference_points.dim() != 4 or call.reference_points.shape[:3] != (B, Q, L):
        return False
    mask, identity = call.key_padding_mask, call.identity
    if mask is not None and (mask.shape != (B, S) or mask.dtype != torch.bool):
        return False
    if not _layers_fit(call):
        return False
    if identity is not None and identity.shape != (B, Q, call.parameters[6].shape[0]):
        return False
    return _levels_fit(call.level_shapes, call.level_starts, S)


def _layers_fit(call: _Call) -> bool:
    """Return whether weights and biases fit the four layers."""
    parameters, G = call.parameters, call.num_heads
    if len(parameters) != 8 or any(tensor.dim() == 0 for tensor in parameters) or G < 1:
        return False
    samples = G * sum(call.num_points)
    channels, out = parameters[4].shape[0], parameters[6].shape[0]
    columns, value_columns = call.query.shape[2], call.value.shape[2]
    expected = [(2 * samples, columns), (samples, columns), (channels, value_columns), (out, channels)]
    return channels % G == 0 and all(
        weight.shape == shape and bias.shape == shape[:1]
        for weight, bias, shape in zip(parameters[::2], parameters[1::2], expected, strict=True)
    )


def _levels_fit(level_shapes: Tensor, level_starts: Tensor, S: int) -> bool:
    """Return whether all levels of tables on the CPU lie within the S rows of value."""
    if level_shapes.device.type != "cpu" or level_starts.device.type != "cpu":
        return True  # The kernel reads them on the device, where a level that does not fit gives NaN.
    shapes, starts = level_shapes.tolist(), level_starts.tolist()
    return sum(height * width for height, width in shapes) == S and all(
        min(height, width) > 0 and 0 <= start <= S - height * width
        for (height, width), start in zip(shapes, starts, strict=True)
    )


def _run(operator: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
    """Return the results of a C++ operator. If the GPU lacks memory, the error has torch's type for that again.

    The stable interface of C++ turns every error of a nested call into a RuntimeError with the same message.
    """
    try:
        return operator(*arguments)
    except RuntimeError as error:
        if "out of memory" in str(error) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


class _Projected(torch.autograd.Function):
    """One call of C++ forward and one backward (csrc/ms_deform_attn_projected.cpp)."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, num_heads: int, num_points: list[int], *tensors: Any) -> Tensor:
        """Return the output; ``tensors`` are those of ``_Call``, with the parameters one by one."""
        shapes, starts, mask, identity, *differentiable = tensors
        reference_points, query, value, *parameters = differentiable
        geometry = (mask, shapes, starts, reference_points)
        operator = torch.ops.visdet.ms_deform_attn_projected.default
        with torch._C._AutoDispatchBelowAutograd():
            output, *saved = _run(
                operator, query, value, identity, *geometry, num_points, num_heads, parameters, dtype
            )
        ctx.save_for_backward(*geometry, *saved)
        ctx.numbers = num_points, num_heads
        # What the operator is asked for in the backward: a gradient in ``dtype`` or in float32.
        ctx.kinds = [1 if tensor.dtype == dtype else 2 for tensor in differentiable]
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        mask, shapes, starts, reference_points, *saved = ctx.saved_tensors
        of_identity, *needs = ctx.needs_input_grad[6:]
        wanted = [kind if needed else 0 for kind, needed in zip(ctx.kinds, needs, strict=True)]
        geometry = (mask, shapes, starts, reference_points, *ctx.numbers)
        operator = torch.ops.visdet.ms_deform_attn_projected_backward.default
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        grads = iter(_run(operator, grad_output, saved, *geometry, wanted, is_deterministic))
        return (
            *[None] * 6,
            grad_output if of_identity else None,
            *(next(grads) if needed else None for needed in needs),
        )


_is_built = declares("ms_deform_attn_projected")
