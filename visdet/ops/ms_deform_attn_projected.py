"""Multi-scale deformable attention with its four linear layers, as one node of the autograd graph."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .ms_deform_attn import fused_geometry, has_fused_kernel
from .tracing import is_traced

__all__ = ["ms_deform_attn_projected"]


def ms_deform_attn_projected(
    query: Tensor,  # [B, Q, channels]
    value: Tensor,  # [B, S, channels]
    key_padding_mask: Tensor | None,  # [B, S], True where a row of value counts as zero
    level_shapes: Tensor,  # [L, 2] (height, width)
    level_starts: Tensor | None,  # [L]
    reference_points: Tensor,  # [B or 1, Q, L or 1, 2 or 4]
    num_points: Sequence[int],  # [L]
    num_heads: int,
    layers: Sequence[tuple[Tensor, Tensor]],  # weight and bias of those of offsets, logits, value and output
) -> Tensor | None:  # [B, Q, channels of the output]
    """Return ``ms_deform_attn_fused`` of what linear layers predict, projected; None where this has no gain or no way.

    The same numbers as from separate calls, in autocast's type where it is on, with fewer launches: one node of the
    autograd graph instead of some thirty. Gradients of float32 tensors leave their products in float32, without being
    rounded to autocast's type and converted, and those of biases are products with ones, for which CUDA takes less
    than half of the time of torch's sum. Differentiable once.

    None without gradients, under ``torch.compile``, exports, traces and ``torch.func``; where types differ (but for
    what autocast converts); and for devices and numbers of levels without a kernel.

    Raises:
        RuntimeError: a shape, type, size or device does not fit; the message names the argument.
    """
    if is_traced() or not torch.is_grad_enabled():
        return None
    parameters = [parameter for layer in layers for parameter in layer]
    dtype, types = query.dtype, {tensor.dtype for tensor in (query, value, *parameters)}
    if torch.is_autocast_enabled(query.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)
        types.discard(torch.float32)  # which autocast converts
    if not types <= {dtype}:
        return None
    shapes, starts, reference_points, points = fused_geometry(
        value, level_shapes, level_starts, reference_points, num_points
    )
    if not has_fused_kernel(value, shapes):
        return None
    return _Projected.apply(
        dtype,
        num_heads,
        points,
        shapes,
        starts,
        key_padding_mask,
        reference_points,
        query,
        value,
        *parameters,
    )


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype,
        num_heads: int,
        num_points: list[int],
        level_shapes: Tensor,
        level_starts: Tensor,
        key_padding_mask: Tensor | None,
        reference_points: Tensor,
        query: Tensor,
        value: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.types = [tensor.dtype for tensor in (query, value, *parameters)]
        ctx.num_points = num_points
        query, value = query.to(dtype).contiguous(), value.to(dtype).contiguous()
        weights, biases = [w.to(dtype) for w in parameters[::2]], [b.to(dtype) for b in parameters[1::2]]
        offsets, logits = (F.linear(query, weights[i], biases[i]) for i in range(2))
        maps = F.linear(value, weights[2], biases[2])
        if key_padding_mask is not None:
            maps.masked_fill_(key_padding_mask.unsqueeze(-1), 0.0)
        rows = (*query.shape[:2], num_heads, sum(num_points))
        samples = (
            maps.unflatten(-1, (num_heads, -1)),
            level_shapes,
            level_starts,
            reference_points,
            offsets.view(*rows, 2),
            logits.view(rows),
        )
        with torch._C._AutoDispatchBelowAutograd():
            sampled = torch.ops.visdet.ms_deform_attn_fused.default(*samples, num_points)
        ctx.save_for_backward(key_padding_mask, query, value, sampled, *weights, *samples)
        return F.linear(sampled, weights[3], biases[3])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        mask, query, value, sampled, *rest = ctx.saved_tensors
        weights, samples = rest[:4], rest[4:]
        needs_reference, needs_query, needs_value, *needs_parameters = ctx.needs_input_grad[6:]
        query_type, value_type, *parameter_types = ctx.types

        grad_output = grad_output.flatten(0, 1)
        grad_maps, grad_reference, grad_offsets, grad_logits = (
            torch.ops.visdet.ms_deform_attn_fused_backward.default(
                torch.mm(grad_output, weights[3]).view(sampled.shape),
                *samples,
                ctx.num_points,
                needs_reference,
                torch.are_deterministic_algorithms_enabled(),
            )
        )
        if mask is not None:
            grad_maps.masked_fill_(mask[..., None, None], 0.0)
        grad_offsets, grad_logits, grad_maps = (
            grad.flatten(2).flatten(0, 1) for grad in (grad_offsets, grad_logits, grad_maps)
        )
        grad_query = grad_value = None
        if needs_query:
            grad_query = _product(grad_offsets, weights[0], query_type)
            grad_query = _product(grad_logits, weights[1], query_type, plus=grad_query).view(query.shape)
        if needs_value:
            grad_value = _product(grad_maps, weights[2], value_type).view(value.shape)

        grad_parameters: list[Tensor | None] = []
        layers = ((grad_offsets, query), (grad_logits, query), (grad_maps, value), (grad_output, sampled))
        ones = grad_output.new_ones(1, max(len(grad_output), len(grad_maps)))
        for i, (grad, x) in enumerate(layers):
            weight_type, bias_type = parameter_types[2 * i : 2 * i + 2]
            needs_weight, needs_bias = needs_parameters[2 * i : 2 * i + 2]
            grad_parameters += [
                _product(grad.t(), x.flatten(0, 1), weight_type) if needs_weight else None,
                _product(ones[:, : len(grad)], grad, bias_type)[0] if needs_bias else None,
            ]
        return (
            *[None] * 6,
            grad_reference if needs_reference else None,
            grad_query,
            grad_value,
            *grad_parameters,
        )


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, plus: Tensor | None = None) -> Tensor:
    """Return ``plus`` and the matrix product in ``dtype``, in which it leaves a CUDA kernel."""
    if a.dtype == dtype:
        return torch.mm(a, b) if plus is None else torch.addmm(plus, a, b)
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype) if plus is None else torch.addmm(plus, a, b, out_dtype=dtype)
    product = torch.mm(a, b).to(dtype)
    return product if plus is None else product.add_(plus)
