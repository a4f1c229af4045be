"""Problems of roi_align, roi_align_rotated, roi_pool and deform_roi_pool."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import Draw, Operator, Problem, largest, rand, wide_of
from visdet.ops import deform_roi_pool, roi_align, roi_align_rotated, roi_pool
from visdet.ops.deform_roi_pool import deform_roi_pool_reference
from visdet.ops.roi_align import roi_align_reference
from visdet.ops.roi_align_rotated import roi_align_rotated_reference
from visdet.ops.roi_pool import roi_pool_reference

__all__ = ["OPERATORS", "draw_regions", "positions_in_bins"]

NOWHERE = (0.0, -900.0, -900.0, -890.0, -890.0)  # a region without any pixel
CLEAR = 1e-3
NOWHERE_ROTATED = (*NOWHERE[:3], 10.0, 10.0, 0.0)


def _regions(draw: Draw, images: Tensor, scale: float) -> Tensor:
    """Return regions [N, 5] whose corners are multiples of 1/8 pixel, which every dtype represents exactly."""
    B, _, H, W = images.shape
    N = draw.pick(100, 500) if draw.is_big else draw.size(12)
    if B == 0:
        N = 0
    image = draw.whole(0, max(B, 1), N).double()
    x, y = draw.uniform(-4, W + 2, N), draw.uniform(-4, H + 2, N)
    regions = torch.stack([image, x, y, x + draw.uniform(0, W + 3, N), y + draw.uniform(0, H + 3, N)], 1)
    regions[:, 1:] = (regions[:, 1:] * 8).round() / 8 / scale
    if draw.chance(0.1):  # without area, or the wrong way round
        regions[:, 3:] = regions[:, 1:3] + draw.pick(0.0, -1.0)
    return regions


def _turned(draw: Draw, regions: Tensor) -> Tensor:
    """Return rotated regions [N, 6] with the centres and sides of regions [N, 5]."""
    sides = (regions[:, 3:] - regions[:, 1:3]).clamp(min=0)
    angles = (draw.uniform(-7, 7, len(regions)) * 8).round() / 8
    return torch.cat([regions[:, :1], regions[:, 1:3] + sides / 2, sides, angles[:, None]], 1)


def _spoil_some(draw: Draw, regions: Tensor, B: int) -> Tensor:
    """Make some regions bad in place, and return a mask of them.

    A bad region has the index of no image, or corners that are NaN, infinite or huge.
    """
    is_bad = torch.zeros(len(regions), dtype=torch.bool)
    if draw.has_bad_numbers and len(regions) and draw.chance(0.5):
        for _ in range(draw.random.randint(1, 3)):
            row, column = draw.random.randrange(len(regions)), draw.random.randrange(regions.shape[1])
            indices = (-1.0, float(B), 1e9, math.nan, -math.inf)
            corners = (math.nan, math.inf, -math.inf, 1e30, -1e30, 1e5)
            regions[row, column] = draw.pick(*(corners if column else indices))
            is_bad[row] = True
    return is_bad


def positions_in_bins(low: float, high: float, bins: int, ratio: int) -> list[float]:
    size = (high - low) / bins
    count = ratio if ratio > 0 else math.ceil(size)
    return [low + (b + (i + 0.5) / count) * size for b in range(bins) for i in range(count)]


def _is_unclear(
    region: list[float], images: Tensor, settings: dict[str, Any], near_bad_numbers: bool
) -> bool:
    """Return whether rounding decides if a sample is inside the map, or if it reads a bad number."""
    scale, shift = settings["spatial_scale"], 0.5 if settings.get("aligned", True) else 0.0
    for axis in (0, 1):
        low, high = region[1 + axis] * scale - shift, region[3 + axis] * scale - shift
        high = high if settings.get("aligned", True) else max(high, low + 1)
        bins, side = settings["output_size"][1 - axis], images.shape[3 - axis]
        for place in positions_in_bins(low, high, bins, settings["sampling_ratio"]):
            if abs(place + 1) < CLEAR or abs(place - side) < CLEAR:
                return True
            if near_bad_numbers and abs(place - round(place)) < CLEAR:
                return True
    return False


def _is_unclear_rotated(
    region: list[float], images: Tensor, settings: dict[str, Any], near_bad_numbers: bool
) -> bool:
    """Return the same for a rotated region."""
    scale, shift = settings["spatial_scale"], 0.5 if settings["aligned"] else 0.0
    x, y, w, h, angle = (*(number * scale for number in region[1:5]), region[5])
    if not settings["aligned"]:
        w, h = max(w, 1), max(h, 1)
    angle = angle if settings["clockwise"] else -angle
    PH, PW = settings["output_size"]
    down, across = (
        torch.tensor(
            positions_in_bins(-extent / 2, extent / 2, bins, settings["sampling_ratio"]), dtype=torch.float64
        )
        for extent, bins in ((h, PH), (w, PW))
    )
    right = across * math.cos(angle) - down[:, None] * math.sin(angle) + x - shift
    below = across * math.sin(angle) + down[:, None] * math.cos(angle) + y - shift
    for places, side in ((right, images.shape[3]), (below, images.shape[2])):
        is_near = ((places + 1).abs() < CLEAR) | ((places - side).abs() < CLEAR)
        if near_bad_numbers:  # A sample on the first pixel reads the second one, too, with weight 0.
            places = places.clamp(min=0)
            is_near |= (places - places.round()).abs() < CLEAR
        if is_near.any():
            return True
    return False


def _edges_unclear(region: list[float], settings: dict[str, Any]) -> bool:
    """Return whether rounding may move the edge of a bin of roi_pool to another pixel."""
    scale = settings["spatial_scale"]
    for axis in (0, 1):
        low, high = region[1 + axis] * scale, (region[3 + axis] + 1) * scale
        bins = settings["output_size"][1 - axis]
        for k in range(bins + 1):
            edge = low + k * (high - low) / bins
            if abs(edge - round(edge)) < CLEAR and bins & (bins - 1):
                return True
    return False


def draw_regions(draw: Draw, kind: str) -> Problem:
    B, C = draw.size(3), draw.pick(1, 2, 3, 8, 13, 30)
    H, W = draw.size(20, 0.01), draw.size(20, 0.01)
    images = draw.place(draw.with_bad_numbers(draw.numbers(B, C, H, W)), draw.dtype())
    wide = wide_of(images.dtype)
    settings: dict[str, Any] = {
        "output_size": (draw.pick(1, 2, 3, 7), draw.pick(1, 2, 4, 7)),
        "spatial_scale": draw.pick(1.0, 0.5, 0.25, 2.0),
    }
    if kind != "roi_pool":
        settings["sampling_ratio"] = draw.pick(0, 0, 1, 2, 3)
    if kind == "roi_align":
        settings.update(pool_mode=draw.pick("avg", "avg", "max"), aligned=draw.chance(0.7))
    is_rotated = "rotated" in kind
    if is_rotated:
        settings.update(aligned=kind == "roi_align_rotated" and draw.chance(0.7), clockwise=draw.chance(0.5))
    if kind == "deform_roi_pool":
        settings["gamma"] = draw.pick(0.1, 0.5)
    regions = _regions(draw, images, settings["spatial_scale"])
    nowhere = torch.tensor(NOWHERE, dtype=regions.dtype)
    if is_rotated:
        regions, nowhere = _turned(draw, regions), torch.tensor(NOWHERE_ROTATED, dtype=regions.dtype)
    is_unclear = _is_unclear_rotated if is_rotated else _is_unclear
    for row, region in enumerate(regions.tolist()):
        if kind == "roi_pool":
            unclear = _edges_unclear(region, settings)
        else:
            unclear = is_unclear(region, images, settings, draw.has_bad_numbers)
        if unclear:
            regions[row] = nowhere
    exact = regions.clone()
    is_bad = _spoil_some(draw, regions, B)
    exact[is_bad] = nowhere
    arguments: dict[str, Any] = {
        "input": images,
        "rois": draw.place(regions, wide, can_expand=False),
        **settings,
    }
    any_bad = bool(is_bad.any())
    rows = is_bad[:, None, None, None]
    skip: dict[str, Any] = {
        "output": rows,
        "offset": rows,
        "input": any_bad or settings.get("pool_mode") == "max",
    }
    if kind == "deform_roi_pool":
        _add_offset(draw, arguments, images, exact, settings, skip)
    side = max(H, W, 1)
    return Problem(
        arguments,
        differentiable=("input", "offset") if arguments.get("offset") is not None else ("input",),
        positions=("rois", "offset", "input") if kind == "roi_pool" else ("rois", "offset"),
        reference_arguments={"rois": exact.to(images.device)},
        wide=wide,
        error_factor=64.0 + 32 * side + 8 * len(regions),
        skip=skip,
        may_refuse="a region is bad or a map is empty" if any_bad or H * W == 0 else "",
    )


def _add_offset(
    draw: Draw,
    arguments: dict,
    images: Tensor,
    regions: Tensor,
    settings: dict[str, Any],
    skip: dict[str, Any],
) -> None:
    """Add offsets to a problem of deform_roi_pool. If a sample moves to an unclear place, nothing is compared."""
    if draw.chance(0.2):
        arguments["offset"] = None
        return
    PH, PW = settings["output_size"]
    wide = wide_of(images.dtype)
    offset = draw.numbers(len(regions), 2, PH, PW).to(wide).double()
    corners = regions[:, 1:] * settings["spatial_scale"] - 0.5
    unclear = False
    for n, (x1, y1, x2, y2) in enumerate(corners.tolist()):
        for axis, (low, high, bins) in enumerate(((x1, x2, PW), (y1, y2, PH))):
            places = torch.tensor(
                positions_in_bins(low, high, bins, settings["sampling_ratio"]), dtype=torch.float64
            )
            if len(places) == 0:
                continue
            places = places.view(bins, -1)  # [bins, samples]
            places = places[None] if axis == 0 else places[:, None]
            moved = places + settings["gamma"] * (high - low) * offset[n, axis][..., None]
            unclear |= bool(((moved - moved.round()).abs() < CLEAR).any())
    arguments["offset"] = draw.place(draw.with_bad_numbers(offset, 0.3), wide, can_expand=False)
    bad = not bool((arguments["offset"].abs() < 1e4).all())
    if unclear or bad:
        skip.update(offset=True, input=True, output=True)


def _pool_reference(
    input: Tensor, rois: Tensor, output_size: tuple[int, int], spatial_scale: float
) -> Tensor:
    return roi_pool_reference(input, rois, *output_size, spatial_scale)[0]


def _deform_reference(offset: Tensor | None, **others: Any) -> Tensor:
    safe = None if offset is None else torch.where(offset.abs() < 1e4, offset, 0.0)
    return deform_roi_pool_reference(offset=safe, **others)


def _bounds(problem: Problem, bounds: dict[str, float]) -> None:
    images, regions = problem.arguments["input"], problem.reference_arguments["rois"]
    bounds["output"] = largest(images)
    if "input" in bounds:
        bounds["input"] = max(bounds["input"], bounds.get("grad_peak", 0.0))
    if "offset" in bounds:
        extent = largest(regions) + 1
        channels = images.shape[1]
        bounds["offset"] = 8 * largest(images) * bounds.get("grad_peak", 0.0) * channels * extent


@st.composite
def _launches_of_roi_pool(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "input": sizes.empty(
            draw(st.integers(1, 3)), draw(sizes.channels), draw(sizes.side) + 1, draw(sizes.side) + 1
        ),
        "rois": sizes.empty(draw(sizes.count), 5),
        "output_size": draw(st.integers(1, 14)),
    }


@st.composite
def _launches_of_roi_align(draw: st.DrawFn) -> dict[str, Any]:
    drawn = draw(_launches_of_roi_pool())
    dtype = draw(sizes.value_types)
    drawn = {name: given.to(dtype) if name == "input" else given for name, given in drawn.items()}
    ratio = draw(st.sampled_from([0, 2]))
    return drawn | {"output_size": draw(st.sampled_from([1, 7, 14, 33])), "sampling_ratio": ratio}


@st.composite
def _launches_of_roi_align_rotated(draw: st.DrawFn) -> dict[str, Any]:
    drawn = draw(_launches_of_roi_align())
    return drawn | {"rois": sizes.empty(len(drawn["rois"]), 6), "spatial_scale": 0.25}


@st.composite
def _launches_of_deform_roi_pool(draw: st.DrawFn) -> dict[str, Any]:
    drawn = draw(_launches_of_roi_align())
    size = drawn["output_size"]
    return drawn | {"offset": sizes.empty(len(drawn["rois"]), 2, size, size), "spatial_scale": 0.25}


def _of_size(**settings: Any) -> tuple[Callable[[int], Problem], ...]:
    """Return problems with n regions, and with n images."""

    def problem(images: int, regions: int) -> Problem:
        corners = rand(regions, 2) * 5
        index = torch.arange(regions)[:, None] % max(1, images)
        rois = torch.cat([index, corners, corners + 3], 1)
        return Problem({"input": rand(images, 3, 8, 9), "rois": rois, **settings}, ("input",))

    return lambda n: problem(2, n), lambda n: problem(n, 3)


def _deformed(n: int) -> Problem:
    """Return a problem of deform_roi_pool with n regions."""
    problem = _of_size(output_size=2, sampling_ratio=2)[0](n)
    return Problem(problem.arguments | {"offset": rand(n, 2, 2, 2)}, ("input", "offset"))


OPERATORS = (
    Operator(
        "roi_align",
        roi_align,
        lambda draw: draw_regions(draw, "roi_align"),
        roi_align_reference,
        _bounds,
        spoiled={"input": ("rank",), "rois": ("rank", "device", 1)},
        launches=_launches_of_roi_align,
        of_size=_of_size(output_size=2, spatial_scale=0.5),
    ),
    Operator(
        "roi_align_rotated",
        roi_align_rotated,
        lambda draw: draw_regions(draw, "roi_align_rotated"),
        roi_align_rotated_reference,
        _bounds,
        spoiled={"input": ("rank",), "rois": ("rank", "device", 1)},
        launches=_launches_of_roi_align_rotated,
    ),
    Operator(
        "roi_pool",
        roi_pool,
        lambda draw: draw_regions(draw, "roi_pool"),
        _pool_reference,
        _bounds,
        spoiled={"input": ("rank",), "rois": ("rank", "device", 1)},
        launches=_launches_of_roi_pool,
        of_size=_of_size(output_size=2, spatial_scale=0.5),
    ),
    Operator(
        "deform_roi_pool",
        deform_roi_pool,
        lambda draw: draw_regions(draw, "deform_roi_pool"),
        _deform_reference,
        _bounds,
        spoiled={"input": ("rank",), "rois": ("rank", "device", 1), "offset": ("rank", "device", 1, 2)},
        launches=_launches_of_deform_roi_pool,
        of_size=(_deformed,),
    ),
)
