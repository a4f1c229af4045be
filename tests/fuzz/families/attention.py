"""Problems of ms_deform_attn and ms_deform_attn_fused."""

from typing import Any

import torch
from torch import Tensor

from tests.fuzz.problem import EXTREME, HALVES, Draw, Operator, Problem, largest, rand, wide_of
from visdet.ops import (
    ms_deform_attn,
    ms_deform_attn_fused,
    ms_deform_attn_fused_reference,
    ms_deform_attn_reference,
)

__all__ = ["HALVES", "NEAR", "OPERATORS", "gradient_sum", "largest", "near_whole", "row_sum", "wide_of"]

HEAD_CHANNELS = (1, 2, 3, 4, 6, 8, 16, 24, 30, 32, 33, 48, 64, 71, 128)
NEAR = 1e-3  # Rounding may put a position that is this near to a whole number of pixels on either side of it.


def pyramid(draw: Draw, big: bool) -> Tensor:
    """Return level_shapes [L, 2]."""
    if not big:
        L = draw.size(5)
        return torch.tensor([[draw.size(12, 0), draw.size(12, 0)] for _ in range(L)]).reshape(L, 2)
    side = draw.pick(20, 33, 48, 64, 80) if draw.device == "cuda" else draw.pick(12, 20, 24)
    H, W = side, side + draw.size(20, 0)
    levels = [[max(H >> level, 1), max(W >> level, 1)] for level in range(draw.pick(4, 4, 4, 3, 1))]
    return torch.tensor(levels)


def level_tables(draw: Draw, shapes: Tensor, gap: bool = False) -> tuple[Any, Any, Tensor]:
    """Return level_shapes and level_starts in one of the forms that a caller may give, and the starts."""
    areas = shapes.prod(-1).flatten()
    starts = (areas.cumsum(0) - areas).view(shapes.shape[:-1])

    def form(table: Tensor) -> Any:
        kind = draw.random.random()
        if kind < 0.25 and table.numel():
            return table.tolist()
        table = table.to(draw.pick(torch.int64, torch.int64, torch.int32))
        return draw.place(table, can_expand=False) if kind < 0.6 else table

    given_starts = None if not gap and draw.chance(0.2) else form(starts)
    return form(shapes), given_starts, starts


def locations_around(draw: Draw, shapes: Tensor, B: int, Q: int, G: int, P: int) -> Tensor:
    """Return locations [B, Q, G, L, P, 2] (x, y) in 0..1.

    They are spread, around a position, in one cell, on borders or centres of texels, or random numbers.
    """
    L = len(shapes)
    size = shapes.flip(-1).double()[:, None]  # [L, 1, 2]
    kind = draw.random.random()
    if kind < 0.5:
        locations = draw.uniform(-0.2, 1.2, B, Q, G, L, P, 2)
    elif kind < 0.65:  # around a place of the query's own, some pixels away
        centers = torch.rand((1, Q, 1, 1, 1, 2), generator=draw.generator, dtype=torch.float64)
        centers = centers.sort(1).values if draw.chance(0.5) else centers
        moves = torch.randn((B, Q, G, L, P, 2), generator=draw.generator, dtype=torch.float64)
        locations = centers + moves * draw.pick(0.3, 3.0) / size
    elif kind < 0.75:  # all in one cell
        locations = draw.uniform(0, 1, 1, 1, 1, L, 1, 2) + draw.uniform(0, 1e-3, B, Q, G, L, P, 2) / size
    elif kind < 0.9:  # texel centres and borders
        half_texels = torch.rand((B, Q, G, L, P, 2), generator=draw.generator, dtype=torch.float64) * (
            2 * size + 6
        )
        locations = (half_texels.floor() - 3) / (2 * size)
    else:
        locations = draw.numbers(B, Q, G, L, P, 2)
    return draw.with_bad_numbers(locations)


def near_whole(locations: Tensor, sizes: Tensor) -> Tensor:
    """Return a mask, True where a coordinate of a position in pixels is near a whole number."""
    pixels = locations.double() * sizes - 0.5
    return (pixels - pixels.round()).abs() < NEAR * (1 + pixels.abs() * 1e-3)


def _sizes(draw: Draw) -> tuple[Tensor, int, int, int, int, int]:
    """Return level_shapes, B, Q, G, C and P, small and odd or as in a decoder or an encoder."""
    if draw.is_big:
        shapes = pyramid(draw, True)
        rows = int(shapes.prod(1).sum())
        G, C, P = draw.pick(8, 8, 4, 1), draw.pick(32, 32, 16, 64, 8), draw.pick(4, 4, 4, 3, 8)
        Q = draw.pick(rows, rows, 300, 900, 301) if rows <= 4000 or draw.device == "cuda" else 300
        return shapes, draw.pick(1, 2), Q, G, C, P
    shapes = pyramid(draw, False)
    G = draw.size(9)
    C = draw.pick(*HEAD_CHANNELS) if draw.chance(0.9) else draw.pick(0, 256, 257, 1025)
    if G * C > 600:
        G = 1
    rows = int(shapes.prod(1).sum())
    Q = rows if draw.chance(0.1) else draw.size(24)
    return shapes, draw.size(3), Q, G, C, draw.size(6)


def _value(draw: Draw, *shape: int) -> Tensor:
    return draw.place(draw.with_bad_numbers(draw.numbers(*shape)), draw.dtype())


def _factor(shapes: Tensor, samples: int) -> float:
    side = int(shapes.max()) if shapes.numel() else 1
    return 64.0 + 16 * side + 0.5 * samples


def _draw(draw: Draw) -> Problem:
    shapes, B, Q, G, C, P = _sizes(draw)
    L = len(shapes)
    value = _value(draw, B, int(shapes.prod(1).sum()), G, C)
    wide = wide_of(value.dtype)
    locations = locations_around(draw, shapes, B, Q, G, P)
    types = (wide, wide, torch.float64, torch.float32)
    locations = draw.place(locations, draw.dtype(*types), not draw.has_bad_numbers)
    weights = draw.place(draw.with_bad_numbers(draw.numbers(B, Q, G, L, P)), draw.dtype(wide, wide, *HALVES))
    given_shapes, given_starts, starts = level_tables(draw, shapes)
    arguments = {
        "value": value,
        "level_shapes": given_shapes,
        "level_starts": given_starts,
        "locations": locations,
        "weights": weights,
    }
    near = near_whole(locations.to(wide), shapes.flip(-1)[:, None].to(locations.device))
    draw.leave_out(locations, near)
    return Problem(
        arguments,
        differentiable=("value", "locations", "weights"),
        positions=("locations",),
        reference_arguments={"level_shapes": shapes, "level_starts": starts},
        wide=wide,
        error_factor=_factor(shapes, Q * P),
        skip={"locations": near},
        may_refuse="level_shapes is empty or has no rows" if L == 0 else "",
    )


def _bounds(problem: Problem, bounds: dict[str, float]) -> None:
    """Bound sums by the largest value, because errors of positions count in full near a corner of small weight."""
    shapes = problem.reference_arguments["level_shapes"]
    side = float(shapes.max()) if shapes.numel() else 1.0
    peak = largest(problem.arguments["value"])
    bounds["output"] = peak * row_sum(problem.arguments["weights"], 2)
    if "value" in bounds:
        per_texel = largest(problem.arguments["weights"]) * bounds.get("grad_peak", 0.0)
        bounds["value"] = max(bounds["value"], per_texel)
    if "weights" in bounds:
        bounds["weights"] = max(bounds["weights"], peak * gradient_sum(bounds))
    if "locations" in bounds:
        bounds["locations"] = 4 * side * peak * gradient_sum(bounds) * largest(problem.arguments["weights"])


def gradient_sum(bounds: dict[str, float]) -> float:
    """Return a bound of the sum of the magnitudes of grad_output over the channels of a head."""
    return bounds.get("grad_output", 0.0)


def row_sum(tensor: Tensor, dims: int) -> float:
    """Return the largest sum of magnitudes over the last dimensions."""
    tensor = tensor.detach().double().abs()
    tensor = torch.where(tensor < EXTREME, tensor, 0.0).flatten(-dims).sum(-1)
    return float(tensor.max()) if tensor.numel() else 0.0


def _draw_fused(draw: Draw) -> Problem:
    shapes, B, Q, G, C, P = _sizes(draw)
    L = len(shapes)
    value = _value(draw, B, int(shapes.prod(1).sum()), G, C)
    wide = wide_of(value.dtype)
    points = P if draw.chance(0.5) else [draw.size(6) for _ in range(L)]
    counts = [points] * L if isinstance(points, int) else points
    K = sum(counts)
    D = draw.pick(2, 4)
    shared_batch, shared_level = draw.chance(0.2), draw.chance(0.3) and L > 0
    reference_points = draw.uniform(-0.1, 1.1, 1 if shared_batch else B, Q, 1 if shared_level else L, D)
    offsets = draw.numbers(B, Q, G, K, 2)
    kind = draw.random.random()
    if kind < 0.15:
        offsets = (offsets * 2).round() / 2
    elif kind < 0.25:
        offsets = offsets * 1e-3
    logits = draw.numbers(B, Q, G, K)
    if draw.has_bad_numbers and K:
        logits = torch.where(draw.uniform(0, 1, *logits.shape) < 0.1, -torch.inf, logits)
    narrow = draw.dtype(wide, value.dtype, *HALVES)
    offsets = draw.place(draw.with_bad_numbers(offsets), narrow, not draw.has_bad_numbers)
    logits = draw.place(draw.with_bad_numbers(logits), narrow if draw.chance(0.8) else draw.dtype())
    types = (
        (wide,) if shared_batch or shared_level else (wide, wide, *HALVES)
    )  # a sum is rounded for each term
    reference_points = draw.place(draw.with_bad_numbers(reference_points), draw.dtype(*types))
    given_shapes, given_starts, starts = level_tables(draw, shapes)
    level_of = torch.repeat_interleave(torch.arange(L), torch.tensor(counts, dtype=torch.int64))
    near = _near_whole_of_fused(shapes, level_of, counts, reference_points, offsets, wide)
    draw.leave_out(offsets, near)
    return Problem(
        {
            "value": value,
            "level_shapes": given_shapes,
            "level_starts": given_starts,
            "reference_points": reference_points,
            "offsets": offsets,
            "logits": logits,
            "num_points": points,
        },
        differentiable=("value", "reference_points", "offsets", "logits"),
        positions=("reference_points", "offsets", "logits"),
        reference_arguments={"level_shapes": shapes, "level_starts": starts, "num_points": counts},
        wide=wide,
        error_factor=_factor(shapes, Q * P),
        skip={"offsets": near, "reference_points": bool(near.any())},
        may_refuse="there are no levels" if L == 0 else "",
    )


def _near_whole_of_fused(
    shapes: Tensor,
    level_of: Tensor,
    counts: list[int],
    reference_points: Tensor,
    offsets: Tensor,
    wide: torch.dtype,
) -> Tensor:
    """Return a mask [B, Q, G, K, 2], True where a sample's position is near a whole number of pixels."""
    if offsets.numel() == 0:
        return torch.zeros(offsets.shape, dtype=torch.bool)
    reference = (
        reference_points.detach().to(wide).double().cpu().expand(offsets.shape[0], -1, len(shapes), -1)
    )
    moves = offsets.detach().to(wide).double().cpu()
    sizes = shapes.flip(-1).double()[level_of]  # [K, 2]
    centers = reference[..., :2][:, :, level_of][:, :, None]  # [B, Q, 1, K, 2]
    if reference.shape[-1] == 4:
        scale = 0.5 / torch.tensor(counts, dtype=torch.float64)[level_of, None]
        moves = moves * reference[..., 2:][:, :, level_of][:, :, None] * scale
    else:
        moves = moves / sizes
    return near_whole(centers + moves, sizes)


def _fused_reference(reference_points: Tensor, level_shapes: Tensor, value: Tensor, **others: Any) -> Tensor:
    expanded = reference_points.expand(value.shape[0], -1, len(level_shapes), -1)
    return ms_deform_attn_fused_reference(
        value=value, level_shapes=level_shapes, reference_points=expanded, **others
    )


def _fused_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    given = problem.arguments
    shapes = problem.reference_arguments["level_shapes"]
    side = float(shapes.max()) if shapes.numel() else 1.0
    sample = largest(given["value"]) * gradient_sum(bounds)  # a product of a sample and a gradient
    reach = max(1.0, largest(given["reference_points"]), largest(given["offsets"]))
    exponent = 1 + largest(given["logits"], 1e6)  # off by its epsilon times its size
    reach *= exponent
    bounds["output"] = largest(given["value"]) * reach
    # A box of 1e30 with an offset of zero has a position, and a gradient of that size.
    scale = max(reach, largest(given["reference_points"], 1e38))
    per_location = 4 * side * sample * scale * exponent
    heads = max(1, given["value"].shape[2])
    everywhere = max(1, given["value"].shape[0] * max(1, len(shapes)))  # shared by the batch and the levels
    for name, bound in (
        ("value", max(bounds.get("value", 0.0), bounds.get("grad_peak", 0.0)) * exponent),
        ("logits", 2 * sample * reach),
        ("offsets", per_location),
        ("reference_points", per_location * heads * everywhere * reach),
    ):
        if name in bounds:
            bounds[name] = bound


OPERATORS = (
    Operator(
        "ms_deform_attn",
        ms_deform_attn,
        _draw,
        ms_deform_attn_reference,
        _bounds,
        reads_beside=("value",),
        scatters_beside=("weights",),
        spoiled={
            "value": ("rank", "type", 0, 1, 2),
            "locations": ("rank", "device", 0, 1, 2, 3, 4, 5),
            "weights": ("rank", "device", 0, 1, 2, 3, 4),
            "level_shapes": ("rank", 1),
        },
        of_size=(
            lambda n: Problem(
                {
                    "value": rand(2, 12, 2, 4),
                    "level_shapes": [(3, 4)],
                    "level_starts": None,
                    "locations": rand(2, n, 2, 1, 2, 2),
                    "weights": rand(2, n, 2, 1, 2),
                },
                ("value", "locations", "weights"),
            ),
            lambda n: Problem(
                {
                    "value": rand(n, 12, 2, 4),
                    "level_shapes": [(3, 4)],
                    "level_starts": None,
                    "locations": rand(n, 3, 2, 1, 2, 2),
                    "weights": rand(n, 3, 2, 1, 2),
                },
                ("value", "locations", "weights"),
            ),
        ),
    ),
    Operator(
        "ms_deform_attn_fused",
        ms_deform_attn_fused,
        _draw_fused,
        _fused_reference,
        _fused_bounds,
        reads_beside=("value",),
        scatters_beside=("logits",),
        spoiled={
            "value": ("rank", "type", 0, 1, 2),
            "offsets": ("rank", "device", 0, 1, 2, 3, 4),
            "logits": ("rank", "device", 0, 1, 2, 3),
            "level_shapes": ("rank", 1),
        },
        aliases=("ms_deform_attn",),
        of_size=(
            lambda n: Problem(
                {
                    "value": rand(2, 16, 2, 4),
                    "level_shapes": [(3, 4), (2, 2)],
                    "level_starts": None,
                    "reference_points": rand(2, n, 1, 4),
                    "offsets": rand(2, n, 2, 4, 2),
                    "logits": rand(2, n, 2, 4),
                    "num_points": 2,
                },
                ("value", "reference_points", "offsets", "logits"),
            ),
        ),
    ),
)
