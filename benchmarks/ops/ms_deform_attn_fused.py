"""Cases of ms_deform_attn_fused, compared with separate operators."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from visdet.ops import ms_deform_attn, ms_deform_attn_fused, ms_deform_attn_fused_reference

from ..case import Case, peer_of, tolerances
from .ms_deform_attn import PYRAMID, grid_sample_path, work_of
from .ms_deform_attn import make_arguments as make_plain_arguments

ENCODER = dict(B=2, Q=sum(H * W for H, W in PYRAMID), G=8, C=32, P=4, levels=PYRAMID, local=True)
# Offsets are multiples of 1/64 pixel, and references lie between two of them. No position is therefore at a texel
# centre, where the gradient of a location jumps, whatever dtype the offsets have.
GRID = 64


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
        tolerance=partial(tolerances, ("output", "value", "offsets", "logits"), ()),
        peers=(
            peer_of("torch", partial(composed, sample=grid_sample_path), (0, 4, 5)),
            peer_of("composed", composed, (0, 4, 5)),
        ),
        batched=(0, 3, 4, 5),
        checked_batches=(1,),
        **others,
    )


CASES = [_fused_case("encoder", 2), _fused_case("encoder-boxes", 4)]
