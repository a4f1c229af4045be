"""Cases of deformable_aggregation, with the sizes of SparseDrive's heads and of SparseDriveV2's paths."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.ops import deformable_aggregation, deformable_aggregation_reference

from ..case import Case, Peer, Work, peer_of, seeded, tolerances

Levels = tuple[tuple[int, int], ...]  # (height, width)

CAMERAS, GROUPS, CHANNELS = 6, 8, 256
LEVELS: Levels = ((64, 176), (32, 88), (16, 44), (8, 22))  # 704 x 256 pixels at strides 4 to 32


def make_arguments(
    dtype: torch.dtype, device: torch.device, *, B: int, Q: int, P: int, levels: Levels, visible: float
) -> tuple[Any, ...]:
    """Return features, level_shapes and level_starts (on the CPU), locations, weights.

    Each (point, camera) pair is visible with probability ``visible``, and its location is then uniform in the image.
    Weights are a softmax over P * V * L. Positions keep a tenth of a texel of the finest level from the texel centres
    of all levels, where the gradient of a location jumps. The sizes of the levels must therefore differ by powers of
    two. Only features have the dtype ``dtype``.
    """
    generator = seeded()
    V, G, C, L = CAMERAS, GROUPS, CHANNELS, len(levels)
    level_shapes = torch.tensor(levels).repeat(V, 1, 1)
    areas = level_shapes.prod(-1).flatten()
    starts = (areas.cumsum(0) - areas).view(V, L)
    S = int(areas.sum())
    finest = torch.tensor(levels[0]).flip(0).float()  # (width, height)
    texel = (torch.rand(B, Q, P, V, 2, generator=generator) * finest).floor()
    fraction = 0.1 + 0.3 * torch.rand(B, Q, P, V, 2, generator=generator)
    fraction = fraction + 0.5 * (torch.rand(B, Q, P, V, 2, generator=generator) < 0.5)
    locations = (texel + fraction) / finest
    hidden = torch.rand(B, Q, P, V, 1, generator=generator) >= visible
    locations = locations + 2.0 * hidden
    weights = torch.randn(B, Q, P * V * L, G, generator=generator).softmax(2).view(B, Q, P, V, L, G)
    features = torch.randn(B, S, C, generator=generator).to(dtype)
    return features.to(device), level_shapes, starts, locations.to(device), weights.to(device)


def work_of(dtype: torch.dtype, *, B: int, Q: int, P: int, levels: Levels, visible: float) -> dict[str, Work]:
    """Return the bytes of forward and backward. Samples read rows that L1 cannot hold."""
    element, L = dtype.itemsize, len(levels)
    S = CAMERAS * sum(H * W for H, W in levels)
    pairs = int(B * Q * P * CAMERAS * visible)
    samples = pairs * L
    reached = min(B * S, 4 * samples) * CHANNELS * element
    coordinates = B * Q * P * CAMERAS * 8 + samples * GROUPS * 4
    output = B * Q * CHANNELS * element
    read = samples * 4 * CHANNELS * element
    return {
        "forward": Work(
            moved=reached + coordinates + output,
            gathered=read,
            rows=read,
            rows_footprint=S * CHANNELS * element,
        ),
        "backward": Work(
            moved=reached
            + coordinates
            + output
            + B * (S * CHANNELS * element + Q * P * CAMERAS * L * GROUPS * 4),
            gathered=2 * read,
            rows=read,
            rows_footprint=S * CHANNELS * element,
        ),
    }


def grid_sample_path(
    features: Tensor, level_shapes: Tensor, level_starts: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    """Return the result in plain torch, which is the weighted sum of grid_sample of all cameras for each level.

    The border is that of grid_sample, which is half a texel wider than the operator's. 16-bit features are converted to
    the dtype of the locations first.
    """
    B, _, C = features.shape
    _, Q, P, V, L, G = weights.shape
    grid = (2 * locations - 1).permute(0, 3, 1, 2, 4).flatten(0, 1)  # [B * V, Q, P, 2]
    samples = []
    for level, (H, W) in enumerate(level_shapes[0].tolist()):
        maps = [features[:, start : start + H * W] for start in level_starts[:, level].tolist()]
        stacked = torch.stack(maps, 1).to(grid.dtype).transpose(2, 3).reshape(B * V, C, H, W)
        samples.append(F.grid_sample(stacked, grid, padding_mode="zeros", align_corners=False))
    stack = torch.stack(samples, 0).view(L, B, V, G, C // G, Q, P)
    summed = torch.einsum("lbvgcqp,bqpvlg->bqgc", stack, weights.to(stack.dtype))
    return summed.reshape(B, Q, C).to(features.dtype)


TORCH = peer_of("torch", grid_sample_path, (0, 3, 4))


def _case(
    name: str,
    B: int = 1,
    Q: int = 900,
    P: int = 13,
    visible: float = 0.2,
    levels: Levels = LEVELS,
    peers: tuple[Peer, ...] = (TORCH,),
    **others: Any,
) -> Case:
    numbers = dict(B=B, Q=Q, P=P, levels=levels, visible=visible)
    return Case(
        op="deformable_aggregation",
        name=name,
        sizes=f"B{B} Q{Q} P{P} V{CAMERAS} L{len(levels)} G{GROUPS} C{CHANNELS}, {visible:.0%} visible",
        make=partial(make_arguments, **numbers),
        function=deformable_aggregation,
        reference=deformable_aggregation_reference,
        differentiable={"features": 0, "locations": 3, "weights": 4},
        work=partial(work_of, **numbers),
        tolerance=partial(tolerances, ("output", "features"), ("locations", "weights")),
        peers=peers,
        batched=(0, 3, 4),
        checked_batches=(0,) if B == 1 else (B - 1,),
        **others,
    )


CASES = [
    _case("tiny", Q=7, P=3, levels=((8, 16), (4, 8))),
    _case("det-b1"),
    _case("det-b1-visible", visible=1.0, heavy=True),
    _case("det-b6", B=6, heavy=True),
    _case("map-b1", Q=100, P=300, heavy=True),
    _case("map-b1-visible", Q=100, P=300, visible=1.0, heavy=True),
    _case("map-b6", B=6, Q=100, P=300, heavy=True),
    _case("paths", Q=1024, P=500, heavy=True, peers=()),  # SparseDriveV2's candidates on NAVSIM
]
