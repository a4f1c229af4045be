"""Cases of ms_deform_attn_fused and of the attention module around it, compared with separate operators."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.ops import ms_deform_attn, ms_deform_attn_fused, ms_deform_attn_fused_reference
from visdet.ops.fused import autocast_linear, suits_autocast_linear

from ..case import Call, Case, Peer, Work, dtype_name
from .ms_deform_attn import COORDINATE_TOLERANCE, PYRAMID, VALUE_TOLERANCE, grid_sample_path, work_of
from .ms_deform_attn import make_arguments as make_plain_arguments

ENCODER = dict(B=2, Q=sum(H * W for H, W in PYRAMID), G=8, C=32, P=4, levels=PYRAMID, local=True)
# Offsets are multiples of 1/64 pixel, and references lie between two of them. No position is therefore at a texel
# centre, where the gradient of a location jumps, whatever dtype the offsets have.
GRID = 64
# The output features of the module's layers.
LAYERS = {"sampling_offsets": 8 * 16 * 2, "attention_weights": 8 * 16, "value_proj": 256, "output_proj": 256}
MODULE_INPUTS = {
    name: position
    for position, name in enumerate(
        ("query", "memory", *(f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")))
    )
}

# Gradients of offsets and logits are rounded to the dtype of these tensors.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 6e-4}
# These are the tolerances of the module. Its positions may be near texel centres, so that single gradients through the
# offsets differ between two right implementations. Those of query and sampling_offsets therefore say little.
MODULE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
LOOSE_TOLERANCE = {"query": 2.0, "sampling_offsets.weight": 0.5, "sampling_offsets.bias": 0.5}


def make_arguments(
    dtype: torch.dtype, device: torch.device, *, references: int, **sizes: Any
) -> tuple[Any, ...]:
    """Return value, level_shapes, level_starts, reference_points, offsets, logits, num_points.

    The locations are those of ms_deform_attn's case, rounded to 1 / GRID pixel. The size of boxes is such that an
    offset of one is one pixel. Offsets and logits have the dtype of value, as under autocast.
    """
    value, level_shapes, starts, locations, weights = make_plain_arguments(dtype, device, **sizes)
    size = level_shapes.flip(1).to(locations)  # [L, 2] (width, height)
    points = ((locations.mean((2, 4)) * size * GRID).floor() + 0.5) / GRID / size  # [B, Q, L, 2]
    offsets = (locations - points[:, :, None, :, None]) * size[:, None]
    offsets = ((offsets * GRID).round() / GRID).to(dtype).flatten(3, 4)
    if references == 4:
        points = torch.cat([points, (2 * sizes["P"] / size).expand_as(points)], -1)
    logits = weights.log().flatten(3).to(dtype)
    return value, level_shapes, starts, points, offsets, logits, [sizes["P"]] * len(sizes["levels"])


def make_module_arguments(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Return query, memory, the weights and biases of the layers, level_shapes, level_starts, references and dtype."""
    _, level_shapes, starts, locations, _ = make_plain_arguments(torch.float32, device, **ENCODER)
    generator = torch.Generator().manual_seed(2)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=generator) * scale).to(device)

    query, memory = (normal(ENCODER["B"], ENCODER["Q"], 256) for _ in range(2))
    parameters = []
    for layer, features in LAYERS.items():
        scale = (3.0 if layer == "sampling_offsets" else 1.0) / 16
        parameters += [normal(features, 256, scale=scale), normal(features, scale=scale)]
    return query, memory, *parameters, level_shapes, starts, locations.mean((2, 4)), dtype


def composed(
    value: Tensor,
    level_shapes: Tensor,
    level_starts: Tensor,
    reference_points: Tensor,
    offsets: Tensor,
    logits: Tensor,
    num_points: list[int],
    sample: Any = ms_deform_attn,
) -> Tensor:
    """Return the same result by separate operators for softmax, locations and ``sample``, as in other modules."""
    coordinates = torch.promote_types(offsets.dtype, torch.float32)
    weights = logits.to(coordinates).softmax(-1).unflatten(3, (len(num_points), -1))
    offsets = offsets.to(coordinates).unflatten(3, (len(num_points), -1))
    centers = reference_points[:, :, None, :, None]
    if reference_points.shape[-1] == 2:
        locations = centers + offsets / level_shapes.flip(1).to(offsets)[:, None]
    else:
        locations = centers[..., :2] + offsets / num_points[0] * centers[..., 2:] * 0.5
    return sample(value, level_shapes, level_starts, locations, weights)


def in_autocast(query: Tensor, dtype: torch.dtype) -> torch.autocast:
    """Return autocast to ``dtype``, which is enabled only for 16 bits, and not for the reference in float64."""
    enabled = dtype.itemsize == 2 and query.dtype != torch.float64
    return torch.autocast(query.device.type, dtype, enabled=enabled)


def module(query: Tensor, memory: Tensor, *arguments: Any) -> Tensor:
    """Return the output of MultiScaleDeformableAttention for ``make_module_arguments``, under autocast for 16 bits."""
    return composed_module(query, memory, *arguments, sample=ms_deform_attn_fused, linear=_linear)


def _linear(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what the linear layers of visdet's models compute in steps by graphs."""
    if suits_autocast_linear(input, weight, bias):
        return autocast_linear(input, weight, bias, torch.get_autocast_dtype("cuda"))
    return F.linear(input, weight, bias)


def composed_module(
    query: Tensor, memory: Tensor, *arguments: Any, sample: Any, linear: Any = F.linear
) -> Tensor:
    """Return the same result by separate layers around ``sample``."""
    *parameters, level_shapes, level_starts, reference_points, dtype = arguments
    layers = dict(zip(LAYERS, zip(parameters[::2], parameters[1::2], strict=True), strict=True))
    with in_autocast(query, dtype):
        value = linear(memory, *layers["value_proj"]).unflatten(-1, (8, -1))
        offsets = linear(query, *layers["sampling_offsets"]).unflatten(-1, (8, 16, 2))
        logits = linear(query, *layers["attention_weights"]).unflatten(-1, (8, 16))
        out = sample(value, level_shapes, level_starts, reference_points, offsets, logits, [4] * 4)
        return linear(out, *layers["output_proj"]) + query


def module_work(dtype: torch.dtype) -> dict[str, Work]:
    """Return the work of the sampling and of the linear layers, which have twice the work in the backward."""
    work = work_of(dtype, **ENCODER)
    tokens, features = ENCODER["B"] * ENCODER["Q"], 256 + 256 + 128 + 256
    flops, moved = 2 * tokens * 256 * features, tokens * (2 * 256 * 4 + features * dtype.itemsize)
    return {
        kind: Work(
            moved=part.moved + times * moved,
            flops=part.flops + times * flops,
            gathered=part.gathered,
            rows_footprint=part.rows_footprint,
            reductions_footprint=part.reductions_footprint,
        )
        for (kind, part), times in zip(work.items(), (1, 2), strict=True)
    }


def _fused_peer(sample: Any) -> Any:
    return lambda *arguments: Call(partial(composed, sample=sample), arguments, (0, 4, 5))


def _module_peer(sample: Any) -> Any:
    path = partial(composed_module, sample=partial(composed, sample=sample))
    return lambda *arguments: Call(path, arguments, tuple(MODULE_INPUTS.values()))


def _torch_memory(arguments: tuple[Any, ...]) -> int:
    """Return an estimate for grid_sample_path, forward and backward, with the sizes of the encoder."""
    return 5 * ENCODER["B"] * ENCODER["Q"] * 8 * 16 * 32 * 4


def _fused_case(name: str, references: int, **others: Any) -> Case:
    return Case(
        op="ms_deform_attn_fused",
        name=name,
        sizes=f"as ms_deform_attn/encoder, offsets and logits in the type of value, {references}-d references",
        make=partial(make_arguments, references=references, **ENCODER),
        function=ms_deform_attn_fused,
        reference=ms_deform_attn_fused_reference,
        differentiable={"value": 0, "offsets": 4, "logits": 5},
        work=partial(work_of, **ENCODER),
        tolerance=lambda dtype: {
            "output": VALUE_TOLERANCE[dtype],
            "value": VALUE_TOLERANCE[dtype],
            "offsets": max(ROUNDING[dtype], COORDINATE_TOLERANCE),
            "logits": max(ROUNDING[dtype], COORDINATE_TOLERANCE),
        },
        peers=(
            Peer("torch", lambda: _fused_peer(grid_sample_path), _torch_memory),
            Peer("composed", lambda: _fused_peer(ms_deform_attn)),
        ),
        batched=(0, 3, 4, 5),
        checked_batches=(1,),
        **others,
    )


def _module_case(dtype: torch.dtype) -> Case:
    tolerance = dict.fromkeys(("output", *MODULE_INPUTS), MODULE_TOLERANCE[dtype]) | LOOSE_TOLERANCE
    return Case(
        op="ms_deform_attn_fused",
        name=f"module-encoder-{dtype_name(dtype)}",
        sizes="query and memory [2, 17821, 256] float32, four linear layers under autocast, encoder's samples",
        make=make_module_arguments,
        function=module,
        reference=partial(composed_module, sample=ms_deform_attn_fused_reference),
        differentiable=MODULE_INPUTS,
        work=module_work,
        tolerance=lambda _: tolerance,
        peers=(
            Peer("torch", lambda: _module_peer(grid_sample_path), _torch_memory),
            Peer("composed", lambda: _module_peer(ms_deform_attn)),
        ),
        dtypes=(dtype,),
    )


CASES = [
    _fused_case("encoder", 2),
    _fused_case("encoder-boxes", 4),
    *[_module_case(dtype) for dtype in MODULE_TOLERANCE],
]
