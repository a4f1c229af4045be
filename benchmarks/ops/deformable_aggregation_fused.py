"""Cases of deformable_aggregation_fused, compared with separate operators for projection, softmax and aggregation."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visdet.ops import (
    deformable_aggregation,
    deformable_aggregation_fused,
    deformable_aggregation_fused_reference,
)

from ..case import COORDINATE_TOLERANCE, Case, Work, peer_of, seeded, tolerances
from .deformable_aggregation import (
    CAMERAS,
    GROUPS,
    LEVELS,
    Levels,
    grid_sample_path,
)
from .deformable_aggregation import make_arguments as make_plain_arguments
from .deformable_aggregation import work_of as plain_work_of

VISIBLE = 1 / CAMERAS  # One camera sees each point.


def make_arguments(
    dtype: torch.dtype, device: torch.device, *, B: int, Q: int, P: int, levels: Levels
) -> tuple[Any, ...]:
    """Return features, level_shapes, level_starts, key_points, projection, image_wh, logits, camera_logits.

    Camera v sees the points with v < x < v + 1 at (x - v, y), which are the locations of deformable_aggregation's case.
    Logits have the dtype of features, as under autocast.
    """
    features, shapes, starts, locations, _ = make_plain_arguments(
        dtype, device, B=B, Q=Q, P=P, levels=levels, visible=1.0
    )
    generator = seeded(1)
    V, L, G = CAMERAS, len(levels), GROUPS
    camera = torch.randint(V, (B, Q, P), generator=generator).to(device)
    xy = locations.gather(3, camera[..., None, None].expand(-1, -1, -1, 1, 2)).squeeze(3)
    points = torch.stack([xy[..., 0] + camera, xy[..., 1], torch.zeros_like(xy[..., 0])], -1)
    projection = torch.eye(4).repeat(B, V, 1, 1)
    projection[..., 2, :3] = 0
    projection[..., 2, 3] = 1
    projection[..., 0, 3] = -torch.arange(V)
    logits = torch.randn(B, Q, L, P, G, generator=generator).to(dtype)
    camera_logits = torch.randn(B, V, L, P, G, generator=generator).to(dtype)
    wh = torch.ones(B, V, 2)
    rest = (tensor.to(device) for tensor in (projection, wh, logits, camera_logits))
    return features, shapes, starts, points, *rest


def composed(
    features: Tensor,
    level_shapes: Tensor,
    level_starts: Tensor,
    key_points: Tensor,
    projection: Tensor,
    image_wh: Tensor,
    logits: Tensor,
    camera_logits: Tensor,
    sample: Callable[..., Tensor] = deformable_aggregation,
) -> Tensor:
    """Return the same result by separate operators, as in SparseDrive's module."""
    extended = torch.cat([key_points, torch.ones_like(key_points[..., :1])], -1)
    pixels = (projection[:, :, None, None] @ extended[:, None, ..., None]).squeeze(-1)
    locations = pixels[..., :2] / pixels[..., 2:3].clamp(min=1e-5) / image_wh[:, :, None, None]
    summed = logits[:, :, None] + camera_logits[:, None]
    weights = summed.to(key_points.dtype).flatten(2, 4).softmax(2).view(summed.shape)
    return sample(
        features,
        level_shapes,
        level_starts,
        locations.permute(0, 2, 3, 1, 4).contiguous(),
        weights.permute(0, 1, 4, 2, 3, 5).contiguous(),
    )


def work_of(dtype: torch.dtype, *, B: int, Q: int, P: int, levels: Levels) -> dict[str, Work]:
    """Return the work of the aggregation, and of reading the logits once and writing their gradients once."""
    logits = B * Q * P * len(levels) * GROUPS * dtype.itemsize
    return {
        kind: replace(part, moved=part.moved + times * logits)
        for (kind, part), times in zip(
            plain_work_of(dtype, B=B, Q=Q, P=P, levels=levels, visible=VISIBLE).items(), (1, 2), strict=True
        )
    }


def _tolerance(dtype: torch.dtype) -> dict[str, float]:
    rounded = tolerances(("output", "features", "logits", "camera_logits"), (), dtype)
    # The gradient sums over six cameras and four levels.
    return rounded | {"key_points": 10 * COORDINATE_TOLERANCE}


def _case(name: str, B: int = 1, Q: int = 900, P: int = 13, levels: Levels = LEVELS, **others: Any) -> Case:
    numbers = dict(B=B, Q=Q, P=P, levels=levels)
    return Case(
        op="deformable_aggregation_fused",
        name=name,
        sizes=f"B{B} Q{Q} P{P} V{CAMERAS} L{len(levels)} G{GROUPS} C256, a point seen by one camera",
        make=partial(make_arguments, **numbers),
        function=deformable_aggregation_fused,
        reference=lambda *given: deformable_aggregation_fused_reference(
            *given, torch.empty(0, dtype=torch.bool, device=given[0].device)
        ),
        differentiable={"features": 0, "key_points": 3, "logits": 6, "camera_logits": 7},
        work=partial(work_of, **numbers),
        tolerance=_tolerance,
        peers=(
            peer_of("torch", partial(composed, sample=grid_sample_path), (0, 3, 6, 7)),
            peer_of("composed", composed, (0, 3, 6, 7)),
        ),
        batched=(0, 3, 4, 5, 6, 7),
        checked_batches=(0,) if B == 1 else (B - 1,),
        **others,
    )


CASES = [
    _case("tiny", Q=7, P=3, levels=((8, 16), (4, 8))),
    _case("det-b1"),
    _case("det-b6", B=6, heavy=True),
    _case("map-b1", Q=100, P=300, heavy=True),
    _case("map-b6", B=6, Q=100, P=300, heavy=True),
]
