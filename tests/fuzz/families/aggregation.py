"""Problems of deformable_aggregation, alone, with depth and fused."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import HALVES, Draw, Operator, Problem, largest, rand, wide_of
from visdet.ops import (
    deformable_aggregation,
    deformable_aggregation_fused,
    deformable_aggregation_fused_reference,
    deformable_aggregation_reference,
    deformable_aggregation_with_depth,
    deformable_aggregation_with_depth_reference,
)

from .attention import gradient_sum, near_whole

__all__ = ["OPERATORS"]


def _tables(draw: Draw, V: int, L: int, side: int) -> tuple[Tensor, Tensor, int]:
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


def _given(draw: Draw, table: Tensor) -> Any:
    kind = draw.random.random()
    if kind < 0.25 and table.numel():
        return table.tolist()
    table = table.to(draw.pick(torch.int64, torch.int64, torch.int32))
    return draw.place(table, can_expand=False) if kind < 0.6 else table


def _sizes(draw: Draw) -> tuple[int, ...]:
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


def _draw(draw: Draw) -> Problem:
    B, Q, P, V, L, G, group, side = _sizes(draw)
    shapes, starts, rows = _tables(draw, V, L, side)
    features = draw.place(draw.with_bad_numbers(draw.numbers(B, rows, G * group)), draw.dtype())
    wide = wide_of(features.dtype)
    locations = draw.uniform(*draw.pick((-0.2, 1.2), (-1.0, 2.0), (0.0, 1.0)), B, Q, P, V, 2)
    kind = draw.random.random()
    if kind < 0.15:  # borders, centres of texels of some level, and zero and one exactly
        size = shapes[0, 0].flip(0).double() if shapes.numel() else 4.0
        locations = (locations * 2 * size).round() / (2 * size)
    elif kind < 0.25:
        locations = draw.uniform(0.1, 0.9, 1, 1, 1, V, 2) + draw.uniform(0, 1e-3, B, Q, P, V, 2)
    types = (wide, wide, torch.float64, *HALVES)
    locations = draw.place(draw.with_bad_numbers(locations), draw.dtype(*types), not draw.has_bad_numbers)
    weights = draw.place(
        draw.with_bad_numbers(draw.numbers(B, Q, P, V, L, G)), draw.dtype(wide, features.dtype, *HALVES)
    )
    used = locations.detach().to(wide).double().cpu()
    near = torch.zeros(used.shape, dtype=torch.bool)
    for level in range(L):
        near |= near_whole(used, shapes[:, level].flip(-1).double())
    draw.leave_out(locations, near)
    return Problem(
        {
            "features": features,
            "level_shapes": _given(draw, shapes),
            "level_starts": _given(draw, starts),
            "locations": locations,
            "weights": weights,
        },
        differentiable=("features", "locations", "weights"),
        positions=("locations",),
        reference_arguments={"level_shapes": shapes, "level_starts": starts},
        wide=wide,
        error_factor=64.0 + 16 * (int(shapes.max()) if shapes.numel() else 1) + 0.5 * Q * P,
        skip={"locations": near},
        may_refuse="V * L is 0, so that nested lists say no sizes" if V * L == 0 else "",
    )


def _draw_with_depth(draw: Draw) -> Problem:
    problem = _draw(draw)
    given, D = problem.arguments, draw.pick(1 if draw.has_bad_numbers else 0, 1, 2, 3, 8, 64)
    features, locations = given["features"], given["locations"]
    depths = draw.uniform(-2, D + 1, *locations.shape[:-1], 1)
    if draw.chance(0.2):
        depths = depths.round()
    depths = depths.to(locations)
    near = near_whole(depths.to(problem.wide).double().cpu() + 0.5, torch.ones(1))
    draw.leave_out(depths, near)
    joined = torch.cat([locations.detach(), depths], -1)
    order = ("features", "depth_probs", "level_shapes", "level_starts", "locations", "weights")
    depth_probs = draw.place(draw.uniform(0, 1, *features.shape[:2], D), features.dtype)
    arguments = {
        **given,
        "depth_probs": depth_probs,
        "locations": draw.place(joined, joined.dtype, can_expand=False),
    }
    return replace(
        problem,
        arguments={name: arguments[name] for name in order},
        differentiable=("features", "depth_probs", "locations", "weights"),
        error_factor=4 * problem.error_factor,
        skip={"locations": torch.cat([torch.as_tensor(problem.skip["locations"]), near], -1)},
    )


def _depth_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    _bounds(problem, bounds)
    if "depth_probs" in bounds:
        given = problem.arguments
        channels = max(1, given["features"].shape[2])
        bounds["depth_probs"] = (
            channels * largest(given["features"]) * largest(given["weights"]) * gradient_sum(bounds)
        )
        if "locations" in bounds:
            bounds["locations"] *= max(1.0, channels)


def _bounds(problem: Problem, bounds: dict[str, float]) -> None:
    given, shapes = problem.arguments, problem.reference_arguments["level_shapes"]
    peak, side = largest(given["features"]), float(shapes.max()) if shapes.numel() else 1.0
    counted = max(1, given["weights"].shape[2] * given["weights"].shape[3] * given["weights"].shape[4])
    bounds["output"] = peak * largest(given["weights"]) * counted
    if "weights" in bounds:
        bounds["weights"] = peak * gradient_sum(bounds)
    if "locations" in bounds:
        levels = max(1, shapes.shape[1])
        bounds["locations"] = 4 * side * peak * gradient_sum(bounds) * largest(given["weights"]) * levels


def _cameras(draw: Draw, B: int, V: int) -> Tensor:
    """Return projections [B, V, 4, 4] to 0..1 of cameras that look along the z or the x axis."""
    projection = torch.zeros(B, V, 4, 4, dtype=torch.float64)
    focal = draw.uniform(0.3, 1.0, B, V)
    projection[..., 0, 0] = projection[..., 1, 1] = focal
    projection[..., 0, 2] = projection[..., 1, 2] = 0.5
    projection[..., 2, 2] = projection[..., 3, 3] = 1.0
    projection[..., :3, 3] = draw.uniform(-0.3, 0.3, B, V, 3)
    projection[:, 1::2] = projection[:, 1::2, :, [2, 1, 0, 3]]  # x and z change places
    return projection


def _project(key_points: Tensor, projection: Tensor, image_wh: Tensor | None) -> Tensor:
    """Return the locations and, as the last number, the depths, [B, Q, P, V, 3]."""
    matrix = projection[:, None, None]  # [B, 1, 1, V, 4, 4]
    pixels = (matrix[..., :3, :3] * key_points[..., None, None, :]).sum(-1) + matrix[..., :3, 3]
    locations = pixels[..., :2] / pixels[..., 2:].clamp(min=1e-5)
    if image_wh is not None:
        locations = locations / image_wh[:, None, None]
    return torch.cat([locations, pixels[..., 2:]], -1)


def _is_ambiguous(key_points: Tensor, projection: Tensor, image_wh: Tensor | None, shapes: Tensor) -> Tensor:
    """Return a mask [B, Q, P] of points that rounding may move across a border of the image, of a texel or of depth."""
    projected = _project(key_points, projection, image_wh)
    locations, depths = projected[..., :2], projected[..., 2]
    slack = 1e-3 * (1 + 1 / depths.abs().clamp(min=1e-9))
    unclear = ((locations.abs() < slack[..., None]) | ((locations - 1).abs() < slack[..., None])).any(-1)
    unclear |= depths.abs() < 0.05
    for level in range(shapes.shape[1]):
        size = shapes[:, level].flip(-1).double()
        seen = ((locations > 0) & (locations < 1)).all(-1)
        unclear |= near_whole(locations, size).any(-1) & seen
    return unclear.any(-1)


def _draw_fused(draw: Draw) -> Problem:
    B, Q, P, V, L, G, group, side = _sizes(draw)
    shapes, starts, rows = _tables(draw, V, L, side)
    features = draw.place(draw.with_bad_numbers(draw.numbers(B, rows, G * group)), draw.dtype())
    wide = wide_of(features.dtype)
    image_wh = draw.whole(10, 1000, B, V, 2).double() if draw.chance(0.5) else None
    projection = _cameras(draw, B, V)
    if image_wh is not None:
        projection[..., :2, :] *= image_wh[..., None]
    key_points = draw.uniform(-2, 2, B, Q, P, 3)
    key_points[..., 2] += draw.pick(0.0, 1.5)
    projection = projection.to(wide).double()
    for _ in range(4):
        key_points = key_points.to(wide).double()
        unclear = _is_ambiguous(key_points, projection, image_wh, shapes)
        key_points = torch.where(
            unclear[..., None], key_points + draw.uniform(-0.5, 0.5, B, Q, P, 3), key_points
        )
    unclear = _is_ambiguous(key_points.to(wide).double(), projection, image_wh, shapes)
    key_points = torch.where(unclear[..., None], torch.nan, key_points)
    if draw.has_bad_numbers and draw.chance(0.3):
        hidden = draw.uniform(0, 1, B, Q, P) < 0.1
        key_points[hidden] = draw.pick(torch.nan, torch.inf, -torch.inf)
    has_camera = draw.chance(0.4)
    narrow = draw.dtype(wide, features.dtype, *HALVES)
    logits = draw.numbers(*((B, Q, L, P, G) if has_camera else (B, Q, V, L, P, G)))
    logits = draw.place(draw.with_bad_numbers(logits), narrow)
    camera_logits = draw.place(
        draw.with_bad_numbers(draw.numbers(B, V, L, P, G)), draw.dtype(narrow, narrow, wide)
    )
    keep = draw.place(draw.uniform(0, 1, B, Q, V, P) < 0.8, can_expand=False) if draw.chance(0.4) else None
    arguments = {
        "features": features,
        "level_shapes": _given(draw, shapes),
        "level_starts": _given(draw, starts),
        "key_points": draw.place(key_points, wide, can_expand=False),
        "projection": draw.place(projection, wide, can_expand=False),
        "image_wh": None if image_wh is None else draw.place(image_wh, wide, can_expand=False),
        "logits": logits,
        "camera_logits": camera_logits if has_camera else None,
        "keep": keep,
        "keep_scale": draw.pick(1.0, 1.0, 1.25),
    }
    return Problem(
        arguments,
        differentiable=("features", "key_points", "logits", "camera_logits"),
        positions=("key_points", "projection", "image_wh", "logits", "camera_logits"),
        reference_arguments={"level_shapes": shapes, "level_starts": starts},
        wide=wide,
        error_factor=256.0 + 64 * (int(shapes.max()) if shapes.numel() else 1) + 0.5 * Q * P,
        may_refuse="V * L is 0, so that nested lists say no sizes" if V * L == 0 else "",
    )


def _fused_reference(
    features: Tensor,
    projection: Tensor,
    image_wh: Tensor | None,
    camera_logits: Tensor | None,
    keep: Tensor | None,
    **others: Any,
) -> Tensor:
    empty = features.new_empty(0)
    return deformable_aggregation_fused_reference(
        features=features,
        projection=projection,
        image_wh=projection.new_ones(*projection.shape[:2], 2) if image_wh is None else image_wh,
        camera_logits=empty if camera_logits is None else camera_logits,
        keep=empty.bool() if keep is None else keep,
        **others,
    )


def _fused_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    given, shapes = problem.arguments, problem.reference_arguments["level_shapes"]
    side = float(shapes.max()) if shapes.numel() else 1.0
    exponent = 1 + largest(given["logits"], 1e6)  # The error of an exponent is epsilon times its size.
    if given["camera_logits"] is not None:
        exponent += largest(given["camera_logits"], 1e6)
    sample = largest(given["features"]) * given["keep_scale"] * exponent
    product = sample * gradient_sum(bounds)
    queries = given["key_points"].shape[1]
    bounds["output"] = sample
    # The factor 400 is the square of one over the least depth, 0.05. It occurs in a location and in its derivative.
    for name, bound in (
        ("features", bounds.get("features", 0.0) * exponent),
        ("logits", 2 * product * (given["projection"].shape[1] if given["camera_logits"] is not None else 1)),
        ("camera_logits", 2 * product * max(1, queries)),
        ("key_points", 4 * side * product * 400 * max(1, given["logits"].shape[-1])),
    ):
        if name in bounds:
            bounds[name] = bound


@st.composite
def _launches_of_deformable_aggregation(draw: st.DrawFn) -> dict[str, Any]:
    B, V, L = draw(st.integers(0, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    shapes = [[(draw(sizes.side) + 1, draw(sizes.side) + 1) for _ in range(L)] for _ in range(V)]
    areas = torch.tensor(shapes).prod(2).flatten()
    starts = (areas.cumsum(0) - areas).view(V, L)
    Q, P = draw(sizes.count), draw(st.one_of(sizes.small, st.sampled_from([13, 300])))
    G, group = draw(st.sampled_from([1, 2, 3, 4, 8, 12])), draw(st.sampled_from([1, 2, 3, 6, 8, 12, 32, 40]))
    dtype = draw(sizes.value_types)
    return {
        "features": sizes.empty(B, int(areas.sum()), G * group, dtype=dtype),
        "level_shapes": torch.tensor(shapes),
        "level_starts": starts,
        "locations": sizes.empty(B, Q, P, V, 2, dtype=wide_of(dtype)),
        "weights": sizes.empty(B, Q, P, V, L, G, dtype=draw(st.sampled_from([dtype, wide_of(dtype)]))),
    }


@st.composite
def _launches_of_deformable_aggregation_with_depth(draw: st.DrawFn) -> dict[str, Any]:
    arguments = draw(_launches_of_deformable_aggregation())
    features, locations = arguments.pop("features"), arguments.pop("locations")
    depth_probs = sizes.empty(*features.shape[:2], draw(st.sampled_from([0, 1, 3, 64])), dtype=features.dtype)
    arguments["locations"] = sizes.empty(*locations.shape[:-1], 3, dtype=locations.dtype)
    return {"features": features, "depth_probs": depth_probs, **arguments}


_TWO_CAMERAS = {"level_shapes": [[(3, 4)], [(2, 3)]], "level_starts": [[0], [12]]}  # 18 rows
_SPOILED = {
    "features": ("rank", "type", 0),
    "locations": ("rank", "device", 0, 1, 2, 3, 4),
    "weights": ("rank", "device", 0, 1, 2, 3, 4),
    "level_shapes": ("rank", 2),
}


def _of_shapes(**shapes: tuple[int, ...]) -> Problem:
    return Problem({**_TWO_CAMERAS, **{name: rand(*shape) for name, shape in shapes.items()}}, tuple(shapes))


OPERATORS = (
    Operator(
        "deformable_aggregation",
        deformable_aggregation,
        _draw,
        deformable_aggregation_reference,
        _bounds,
        reads_beside=("features",),
        spoiled=_SPOILED,
        of_size=(
            lambda n: _of_shapes(features=(2, 18, 4), locations=(2, n, 3, 2, 2), weights=(2, n, 3, 2, 1, 2)),
        ),
        launches=_launches_of_deformable_aggregation,
    ),
    Operator(
        "deformable_aggregation_with_depth",
        deformable_aggregation_with_depth,
        _draw_with_depth,
        deformable_aggregation_with_depth_reference,
        _depth_bounds,
        reads_beside=("features", "depth_probs"),
        spoiled={**_SPOILED, "depth_probs": ("rank", "type", 0, 1)},
        aliases=("deformable_aggregation",),
        of_size=(
            lambda n: _of_shapes(
                features=(n, 18, 4),
                depth_probs=(n, 18, 3),
                locations=(n, 5, 3, 2, 3),
                weights=(n, 5, 3, 2, 1, 2),
            ),
        ),
        launches=_launches_of_deformable_aggregation_with_depth,
    ),
    Operator(
        "deformable_aggregation_fused",
        deformable_aggregation_fused,
        _draw_fused,
        _fused_reference,
        _fused_bounds,
        reads_beside=("features",),
        spoiled={
            "features": ("rank", "type", 0),
            "key_points": ("rank", "device", 0, 1, 2, 3),
            "logits": ("rank", "device", 0, 1),
            "level_shapes": ("rank", 2),
        },
        aliases=("deformable_aggregation",),
        of_size=(
            lambda n: Problem(
                {
                    "features": rand(n, 18, 4),
                    **_TWO_CAMERAS,
                    "key_points": rand(n, 5, 3, 3),
                    "projection": torch.eye(4).repeat(n, 2, 1, 1),
                    "image_wh": None,
                    "logits": rand(n, 5, 2, 1, 3, 2),
                },
                ("features", "key_points", "logits"),
            ),
        ),
    ),
)
