"""Problems of pooling in upright and rotated regions."""

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz.problem import Draw, Problem, largest, wide_of
from tests.fuzz.sampling import CLEAR, is_unclear

__all__ = ["ALIGNED", "draw_regions", "region_bounds", "samples_of"]


NOWHERE = (0.0, -900.0, -900.0, -890.0, -890.0)  # a region without any pixel


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
    corners = regions[:, 1:3]
    sides = (regions[:, 3:] - corners).clamp(min=0)
    angles = (draw.uniform(-7, 7, len(regions)) * 8).round() / 8
    return torch.cat([regions[:, :1], corners + sides / 2, sides, angles[:, None]], 1)


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


def _positions_in_bins(low: float, high: float, bins: int, ratio: int) -> list[float]:
    size = (high - low) / bins
    count = ratio if ratio > 0 else math.ceil(size)
    return [low + (b + (i + 0.5) / count) * size for b in range(bins) for i in range(count)]


def samples_of(
    region: list[float],
    output_size: tuple[int, int],
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool = True,
    clockwise: bool = True,
    **others: Any,
) -> tuple[Tensor, Tensor]:  # [samples down, samples across] each
    """Return y and x of the samples of a region, which is upright (x1, y1, x2, y2) or rotated (x, y, w, h, angle)."""
    shift, least, angle = (0.5, -math.inf, 0.0) if aligned else (0.0, 1.0, 0.0)
    if len(region) == 5:
        x1, y1, x2, y2 = (number * spatial_scale - shift for number in region[1:])
        w, h = max(x2 - x1, least), max(y2 - y1, least)
        x, y = x1 + w / 2, y1 + h / 2
    else:
        x, y, w, h = (number * spatial_scale for number in region[1:5])
        x, y, w, h = x - shift, y - shift, max(w, least), max(h, least)
        angle = region[5] if clockwise else -region[5]
    down, across = (
        torch.tensor(_positions_in_bins(-extent / 2, extent / 2, bins, sampling_ratio), dtype=torch.float64)
        for extent, bins in zip((h, w), output_size, strict=True)
    )
    right = across * math.cos(angle) - down[:, None] * math.sin(angle) + x
    below = across * math.sin(angle) + down[:, None] * math.cos(angle) + y
    return below, right


def _is_unclear(
    region: list[float], images: Tensor, settings: dict[str, Any], near_bad_numbers: bool
) -> bool:
    """Return whether rounding decides if a sample is inside the map, or if it reads a bad number."""
    (y, x), (H, W) = samples_of(region, **settings), images.shape[2:]
    unclear = is_unclear(y, x, H, W, False)
    if near_bad_numbers:  # A sample on the first pixel reads the second one, too, with weight 0.
        unclear |= is_unclear(y.clamp(min=0), x.clamp(min=0), H, W, True)
    return bool(unclear.any())


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
    images = draw.values(B, C, H, W)
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
    for row, region in enumerate(regions.tolist()):
        if kind == "roi_pool":
            unclear = _edges_unclear(region, settings)
        else:
            unclear = _is_unclear(region, images, settings, draw.has_bad_numbers)
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
    unclear = False
    for region, moves in zip(regions.tolist(), offset, strict=True):
        y, x = samples_of(region, **settings)
        width, height = (
            (end - start) * settings["spatial_scale"]
            for start, end in zip(region[1:3], region[3:], strict=True)
        )
        for places, side, move in ((x, width, moves[0]), (y, height, moves[1])):
            of_bins = places.reshape(PH, len(y) // PH, PW, y.shape[1] // PW)
            moved = of_bins + settings["gamma"] * side * move[:, None, :, None]
            unclear |= bool(((moved - moved.round()).abs() < CLEAR).any())
    arguments["offset"] = draw.place(offset, wide, can_expand=False, bad=0.3)
    bad = not bool((arguments["offset"].abs() < 1e4).all())
    if unclear or bad:
        skip.update(offset=True, input=True, output=True)


def region_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    images, regions = problem.arguments["input"], problem.reference_arguments["rois"]
    bounds["output"] = largest(images)
    if "input" in bounds:
        bounds["input"] = max(bounds["input"], bounds.get("grad_peak", 0.0))
    if "offset" in bounds:
        extent = largest(regions) + 1
        channels = images.shape[1]
        bounds["offset"] = 8 * largest(images) * bounds.get("grad_peak", 0.0) * channels * extent


ALIGNED = dict(
    input="B C H W", output_size=st.sampled_from([1, 7, 14, 33]), sampling_ratio=st.sampled_from([0, 2])
)
