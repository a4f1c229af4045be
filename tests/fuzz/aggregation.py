"""Problems of deformable aggregation, of which its other forms make theirs."""

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import HALVES, Draw, Problem, Seeded, gradient_sum, largest, rand, wide_of
from tests.fuzz.sampling import longest_side, near_whole, starts_of

__all__ = [
    "SPOILED",
    "TWO_CAMERAS",
    "aggregation_bounds",
    "aggregation_sizes",
    "camera_tables",
    "draw_aggregation",
    "launches_of_aggregation",
    "make_case",
    "of_shapes",
]


SHAPES = [[(7, 5), (3, 4)], [(6, 9), (2, 2)], [(5, 5), (1, 3)]]  # three cameras, two levels


def make_case(B, Q, P, G, C, shapes=SHAPES, dtype=torch.float64, device="cpu", seed=0):
    """Return features, shapes, starts, locations (a part outside), weights; off texel centres and off 0 and 1."""
    draw, wide = Seeded(seed), wide_of(dtype)
    level_shapes = torch.tensor(shapes, dtype=torch.int64)
    V, L = level_shapes.shape[:2]
    starts, rows = starts_of(level_shapes)
    features = draw.normal(B, rows, C)
    locations = draw.uniform(B, Q, P, V, 2) * 1.6 - 0.3
    weights = draw.normal(B, Q, P, V, L, G)
    return (
        features.to(device, dtype),
        level_shapes,
        starts,
        locations.to(device, wide),
        weights.to(device, wide),
    )


def camera_tables(draw: Draw, V: int, L: int, side: int) -> tuple[Tensor, Tensor, int]:
    """Return level_shapes [V, L, 2], level_starts [V, L] and the number of rows of features.

    Some of the rows may belong to no map.
    """
    shapes = torch.tensor([[max(side >> level, 1), max(draw.size(side, 0), 1)] for level in range(L)])
    shapes = shapes.reshape(1, L, 2).repeat(V, 1, 1)
    if draw.chance(0.3):
        shapes[1::2] += 1  # cameras of another size
    areas = shapes.prod(-1).flatten()
    gap = draw.pick(0, 0, 0, 1, 5)
    starts = (areas + gap).cumsum(0) - areas
    if draw.chance(0.2) and len(areas):  # maps in another order
        order = torch.randperm(len(areas), generator=draw.generator)
        starts = torch.empty_like(areas)
        starts[order] = areas[order].cumsum(0) - areas[order]
    rows = int((starts + areas).max()) if len(areas) else draw.size(3)
    return shapes, starts.view(V, L), rows + gap


def aggregation_sizes(draw: Draw) -> tuple[int, ...]:
    """Return B, Q, P, V, L, G, the channels per group, and the side of the largest map."""
    if draw.is_big:
        heads = draw.pick((900, 13), (100, 300), (57, 300), (301, 7))
        Q, P = heads if draw.device == "cuda" else (heads[0] // 20, heads[1])
        side = 32 if draw.device == "cuda" else 12
        return (
            draw.pick(1, 2),
            Q,
            P,
            6 if draw.device == "cuda" else 3,
            draw.pick(1, 4),
            8,
            draw.pick(32, 6, 12),
            side,
        )
    G, group = draw.pick(1, 2, 3, 4, 8), draw.pick(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 24, 32, 71)
    if draw.chance(0.1):
        G, group = 1, draw.pick(0, 1, 30, 71, 256, 1025)
    P = 300 if draw.chance(0.01) else draw.size(9)
    return draw.size(3), draw.size(15), P, draw.size(5), draw.size(4), G, group, draw.size(12, 0)


def draw_aggregation(draw: Draw) -> Problem:
    B, Q, P, V, L, G, group, side = aggregation_sizes(draw)
    shapes, starts, rows = camera_tables(draw, V, L, side)
    features = draw.values(B, rows, G * group)
    wide = wide_of(features.dtype)
    locations = draw.uniform(*draw.pick((-0.2, 1.2), (-1.0, 2.0), (0.0, 1.0)), B, Q, P, V, 2)
    kind = draw.random.random()
    if kind < 0.15:  # borders, centres of texels of some level, and zero and one exactly
        size = shapes[0, 0].flip(0).double() if shapes.numel() else 4.0
        locations = (locations * 2 * size).round() / (2 * size)
    elif kind < 0.25:
        locations = draw.uniform(0.1, 0.9, 1, 1, 1, V, 2) + draw.uniform(0, 1e-3, B, Q, P, V, 2)
    types = (wide, wide, torch.float64, *HALVES)
    locations = draw.place(locations, draw.dtype(*types), not draw.has_bad_numbers, bad=0.5)
    weights = draw.values(B, Q, P, V, L, G, dtype=draw.dtype(wide, features.dtype, *HALVES))
    used = locations.detach().to(wide).double().cpu()
    near = torch.zeros(used.shape, dtype=torch.bool)
    for level in range(L):
        near |= near_whole(used, shapes[:, level].flip(-1).double())
    draw.leave_out(locations, near)
    return Problem(
        {
            "features": features,
            "level_shapes": draw.table(shapes),
            "level_starts": draw.table(starts),
            "locations": locations,
            "weights": weights,
        },
        differentiable=("features", "locations", "weights"),
        positions=("locations",),
        reference_arguments={"level_shapes": shapes, "level_starts": starts},
        wide=wide,
        error_factor=64.0 + 16 * longest_side(shapes) + 0.5 * Q * P,
        skip={"locations": near},
        may_refuse="V * L is 0, so that nested lists say no sizes" if V * L == 0 else "",
    )


def aggregation_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    given, shapes = problem.arguments, problem.reference_arguments["level_shapes"]
    peak, side = largest(given["features"]), longest_side(shapes)
    weights = given["weights"]
    of_weights = largest(weights)
    bounds["output"] = peak * of_weights * max(1, math.prod(weights.shape[2:5]))
    if "weights" in bounds:
        bounds["weights"] = peak * gradient_sum(bounds)
    if "locations" in bounds:
        levels = max(1, shapes.shape[1])
        bounds["locations"] = 4 * side * peak * gradient_sum(bounds) * of_weights * levels


@st.composite
def launches_of_aggregation(draw: st.DrawFn) -> dict[str, Any]:
    B, V, L = draw(st.integers(0, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    shapes = [[(draw(sizes.side) + 1, draw(sizes.side) + 1) for _ in range(L)] for _ in range(V)]
    starts, rows = starts_of(torch.tensor(shapes))
    Q, P = draw(sizes.count), draw(st.one_of(sizes.small, st.sampled_from([13, 300])))
    G, group = draw(st.sampled_from([1, 2, 3, 4, 8, 12, 71])), draw(st.one_of(sizes.small, sizes.channels))
    dtype, tables_on = draw(sizes.value_types), draw(st.sampled_from(["cpu", "meta"]))
    return {
        "features": sizes.empty(B, rows, G * group, dtype=dtype),
        "level_shapes": torch.tensor(shapes, device=tables_on),
        "level_starts": starts.to(tables_on),
        "locations": sizes.empty(B, Q, P, V, 2, dtype=wide_of(dtype)),
        "weights": sizes.empty(B, Q, P, V, L, G, dtype=draw(st.sampled_from([dtype, wide_of(dtype)]))),
    }


TWO_CAMERAS = {"level_shapes": [[(3, 4)], [(2, 3)]], "level_starts": [[0], [12]]}  # 18 rows


SPOILED = {
    "features": ("rank", 0),
    "locations": ("rank", 0, 1, 2, 3, 4),
    "weights": ("rank", 0, 1, 2, 3, 4),
    "level_shapes": ("rank", 2),
    "level_starts": ("None",),
}


def of_shapes(**shapes: tuple[int, ...]) -> Problem:
    return Problem({**TWO_CAMERAS, **{name: rand(*shape) for name, shape in shapes.items()}}, tuple(shapes))
