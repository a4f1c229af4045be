"""Border and Bezier alignment, precise RoI pooling, attention masks, correlation and shifts."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.problem import Draw, Operator, Problem, wide_of
from tests.fuzz.sampling import is_unclear, sampled
from visdet.ops.mmcv.aligned_pooling import bezier_align, border_align, prroi_pool
from visdet.ops.mmcv.map_correlation import correlation, psa_mask, tin_shift

FAR = -900.0  # a place without any pixel


def _maps(draw: Draw, channels: int) -> tuple[Tensor, int, int, int]:
    B, H, W = draw.size(3), draw.size(9), draw.size(9)
    return draw.values(B, channels, H, W), B, H, W


def _problem(name: str, given: dict[str, Any], *others: str, **settings: Any) -> Problem:
    positions = [key for key in given if key in ("boxes", "beziers", "rois")]
    wide = wide_of(given[name].dtype)
    return Problem(given, (name, *others), tuple(positions), wide=wide, error_factor=4000.0, **settings)


def _borders(boxes: Tensor, pool_size: int) -> tuple[Tensor, Tensor]:  # [..., 4, P + 1] each
    """Return y and x of the samples at the top, the left, the bottom and the right."""
    part = torch.arange(pool_size + 1, device=boxes.device).double() / pool_size
    x1, y1, x2, y2 = boxes.double()[..., None].unbind(-2)
    across, down, none = (x2 - x1) * part, (y2 - y1) * part, 0 * part
    y = torch.stack([y1 + none, y1 + down, y2 + none, y2 - down], -2)
    return y, torch.stack([x1 + across, x1 + none, x2 - across, x2 + none], -2)


def _draw_borders(draw: Draw) -> Problem:
    maps, B, H, W = _maps(draw, 4 * draw.size(3))
    N, pool_size = draw.size(8), draw.size(6, 0)
    corner = draw.uniform(-3, 9, B, N, 2)
    boxes = (torch.cat([corner, corner + draw.uniform(-1, 9, B, N, 2)], 2) * 8).round() / 8
    boxes = draw.with_bad_numbers(boxes, 0.3)
    boxes = draw.place(boxes, draw.dtype(maps.dtype, torch.float32), can_expand=False)
    y, x = _borders(boxes, pool_size)
    # A sample on the border reads a neighbour, too, with weight 0.
    boxes[is_unclear(y, x, H, W, draw.has_bad_numbers).flatten(2).any(2)] = FAR
    if draw.has_bad_numbers:
        boxes[boxes.lt(0).any(2) | boxes.gt(min(H, W) - 1).any(2)] = FAR
    given = {"input": maps, "boxes": boxes, "pool_size": pool_size}
    best = _border_samples(maps.double(), boxes, pool_size).topk(2).values
    # Rounding decides which one of equal samples gets the gradient, unless they lie outside the map.
    is_near = (best[..., 0] - best[..., 1] < 1e-4 * (1 + best[..., 0].abs())) & (best != 0).any(-1)
    return _problem("input", given, skip={"input": bool(is_near.any()) or draw.has_bad_numbers})


def _zeros(input: Tensor, *shape: int) -> Tensor:
    """Return zeros, of which the gradient of ``input`` is zero, too."""
    return input.new_zeros(shape) + 0 * input[:0].sum()


def _border_samples(input: Tensor, boxes: Tensor, pool_size: int) -> Tensor:  # [B, C, N, 4, P + 1]
    places = [one.movedim(2, 1).flatten(2) for one in _borders(boxes, pool_size)]
    maps = input.unflatten(1, (4, -1))
    samples = _zeros(input, len(input), 4, maps.shape[2], boxes.shape[1] * (pool_size + 1))
    for b in range(len(input)):
        for side in range(4):
            samples[b, side] = sampled(maps[b, side], *(one[b, side] for one in places))
    return samples.unflatten(3, (boxes.shape[1], pool_size + 1)).permute(0, 2, 3, 1, 4)


def _border_maxima(**given: Any) -> Tensor:
    samples = _border_samples(**given)
    return samples.gather(4, samples.argmax(4, keepdim=True)).squeeze(4)


def _samples_between(
    bezier: Tensor, size: tuple[int, int], scale: float, ratio: int, aligned: bool
) -> tuple[Tensor, Tensor]:  # [PH, PW, down, across] each
    """Return y and x of the samples of one region."""
    upper, lower = (bezier[1:].double() * scale).view(2, 4, 1, 2)
    lower = lower.flip(0)

    def at(curve: Tensor, u: Tensor) -> Tensor:  # by de Casteljau's construction
        while len(curve) > 1:
            curve = curve[:-1] + u * (curve[1:] - curve[:-1])
        return curve[0]

    w, h = torch.maximum((upper[0] - upper[3]).abs(), (lower[0] - lower[3]).abs()).flatten().tolist()
    parts, inside = [], []
    for bins, side in zip(size, (h, w), strict=True):
        extent = (side if aligned else max(side, 1)) / bins
        parts.append(torch.arange(bins, device=bezier.device).double()[:, None] / bins)
        count = ratio if ratio > 0 else math.ceil(extent)
        steps = torch.arange(count, device=bezier.device).double() + 0.5
        inside.append((steps / max(count, 1) - 0.5) * extent)
    down, across = parts[0][:, None], parts[1]
    places = at(upper, across) * (1 - down) + at(lower, across) * down - 0.5 * aligned
    x, y = places[..., None, None].unbind(2)
    return torch.broadcast_tensors(y + inside[0][:, None], x + inside[1])


def _draw_curves(draw: Draw) -> Problem:
    maps, B, H, W = _maps(draw, draw.size(3))
    N, settings = draw.size(6) if B else 0, {"output_size": (draw.size(3, 0), draw.size(4, 0))}
    settings["spatial_scale"] = draw.pick(1.0, 0.5, 0.25)
    settings |= {"sampling_ratio": draw.pick(0, 0, 1, 2), "aligned": draw.chance(0.6)}
    ends = draw.uniform(-2, 10, N, 1, 1, 2) + draw.uniform(-3, 8, N, 2, 4, 2)
    points = (ends.flatten(1) * 8).round() / 8 / settings["spatial_scale"]
    beziers = torch.cat([draw.whole(-1, B + 1, N, 1), points], 1)
    beziers = draw.place(beziers, wide_of(maps.dtype), can_expand=False, bad=0.3)
    for row, bezier in enumerate(beziers):
        if bool(bezier.isfinite().all()) and float(bezier[1:].abs().max()) < 1e4:
            y, x = _samples_between(bezier, *settings.values())
            near_bad = draw.has_bad_numbers
            near = is_unclear(y, x, H, W, near_bad) | (
                near_bad & ((y < 0) | (y > H - 1) | (x < 0) | (x > W - 1))
            )
            sides = (y.shape[2], x.shape[3])
            if bool(near.any()) or max(sides) > 50:
                beziers[row, 1:] = math.nan
        else:
            beziers[row, 1:] = math.nan
    return _problem("input", {"input": maps, "beziers": beziers, **settings})


def _curve_means(input: Tensor, beziers: Tensor, **settings: Any) -> Tensor:
    C, size = input.shape[1], settings["output_size"]
    result = _zeros(input, len(beziers), C, *size)
    for n, bezier in enumerate(beziers):
        image = float(bezier[0])
        if image in range(len(input)) and bool(bezier.isfinite().all()):
            y, x = _samples_between(bezier, *settings.values())
            if y.numel():
                values = sampled(input[int(image)], y.flatten(), x.flatten())
                result[n] = values.view(C, *y.shape).mean((3, 4))
    return result


def _draw_integrals(draw: Draw) -> Problem:
    maps, B, *_ = _maps(draw, draw.size(3))
    N, scale = draw.size(8), draw.pick(1.0, 0.5, 0.25)
    corner = draw.uniform(-3, 9, N, 2)
    sides = draw.uniform(0.5, 9, N, 2) * (1 if draw.chance(0.8) else -1)
    rois = torch.cat([draw.whole(-1, B + 1, N, 1), torch.cat([corner, corner + sides], 1) / scale], 1)
    rois = draw.place(rois, wide_of(maps.dtype), can_expand=False, bad=0.3)
    rois[~(rois[:, 1:].abs() < 1e4).all(1), 1:] = math.nan
    given = {"features": maps, "rois": rois, "output_size": (draw.size(3, 0), draw.size(4, 0))}
    unsure = draw.has_bad_numbers  # Each bin reads all pixels, most of them with weight 0.
    skip: dict[str, Any] = dict.fromkeys(("output", "features", "rois"), unsure)
    return _problem("features", given | {"spatial_scale": scale}, "rois", skip=skip)


def _integral_weights(low: Tensor, high: Tensor, bins: int, size: int) -> Tensor:  # [bins, size]
    """Return each pixel's mean weight in each bin by the trapezoids between whole numbers, which are exact."""
    pixels = torch.arange(size, device=low.device)
    rows = []
    for b in range(bins):
        start, end = low + (high - low) * b / bins, low + (high - low) * (b + 1) / bins
        inner = [low.new_tensor(float(p)) for p in range(math.floor(start) + 1, math.ceil(end))]
        places = torch.stack([start, *inner, end])
        hat = (1 - (places[:, None] - pixels).abs()).clamp(min=0)
        rows.append(torch.trapezoid(hat, places, dim=0) / (end - start))
    return torch.stack(rows)


def _integrals(features: Tensor, rois: Tensor, output_size: tuple[int, int], spatial_scale: float) -> Tensor:
    (_, C, H, W), (PH, PW) = features.shape, output_size
    rows = [features.new_zeros(0, C, PH, PW) + features[:0].sum() + 0 * rois[:0].sum()]
    for roi in rois:
        x1, y1, x2, y2 = roi[1:] * spatial_scale
        means = features.new_zeros(C, PH, PW)
        if float(roi[0]) in range(len(features)) and bool((x2 > x1) & (y2 > y1)):
            down, across = _integral_weights(y1, y2, PH, H), _integral_weights(x1, x2, PW, W)
            means = torch.einsum("ph,chw,qw->cpq", down, features[int(roi[0])], across)
        rows.append(means[None])
    return torch.cat(rows)


def _integral_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    """The corners are positions, so that a gradient's magnitudes are those of the maps' differences."""
    images = problem.arguments["features"].detach().double().abs().nan_to_num(0.0)
    most = float(images.max()) if images.numel() else 0.0
    bounds["output"] = most
    if "features" in bounds:  # of a region that ends beside the map, too
        bounds["features"] = max(bounds["features"], bounds.get("grad_peak", 0.0))
    if "rois" in bounds:
        bins = images.shape[1] * math.prod(problem.arguments["output_size"])
        bounds["rois"] = 8 * most * bins * bounds.get("grad_total", 0.0)


def _draw_masks(draw: Draw) -> Problem:
    B, H, W, mask_size = draw.size(3), draw.size(6), draw.size(6), (draw.size(7, 0), draw.size(7, 0))
    masks = draw.values(B, mask_size[0] * mask_size[1], H, W)
    given = {"input": masks, "psa_type": draw.pick("collect", "distribute"), "mask_size": mask_size}
    problem = Problem(given, ("input",), wide=wide_of(masks.dtype))
    if draw.chance(0.03):
        given["mask_size"], problem.must_refuse = tuple(-size for size in mask_size), "mask_size is negative"
    return problem


def _masks(input: Tensor, psa_type: str, mask_size: tuple[int, int]) -> Tensor:
    (B, _, H, W), (MH, MW) = input.shape, mask_size
    result = _zeros(input, B, H * W, H, W)
    for h, w, i, j in itertools.product(*map(range, (H, W, MH, MW))):
        row, column = h + i - (MH - 1) // 2, w + j - (MW - 1) // 2
        if 0 <= row < H and 0 <= column < W:
            place = (row * W + column, h, w) if psa_type == "collect" else (h * W + w, row, column)
            result[:, place[0], place[1], place[2]] = input[:, i * MW + j, h, w]
    return result


def _draw_maps(draw: Draw) -> Problem:
    B, C, H, W = draw.size(2), draw.size(4), draw.size(8), draw.size(8)
    settings = {name: (draw.size(3, 0), draw.size(3, 0)) for name in ("kernel_size", "patch_size", "stride")}
    settings["padding"] = draw.size(3, 0.4), draw.size(3, 0.4)
    settings |= {name: (draw.size(3, 0), draw.size(3, 0)) for name in ("dilation", "dilation_patch")}
    dtype = draw.dtype()
    given = {name: draw.values(B, C, H, W, dtype=dtype) for name in ("input1", "input2")}
    sizes = _window_counts((H, W), settings)
    refused = "" if min(sizes) > 0 else "no window fits"
    if draw.chance(0.03):
        name = draw.pick(*settings)
        settings[name], refused = (1, -1), f"{name} is negative"
    return Problem(
        given | settings,
        tuple(given),
        wide=wide_of(dtype),
        error_factor=200.0,
        # A pixel that is displaced from outside the map, or has no gradient, is 0 times the other one.
        skip=dict.fromkeys(("output", *given), draw.has_bad_numbers),
        must_refuse=refused,
    )


def _window_counts(sides: tuple[int, ...], settings: dict) -> list[int]:
    names = ("padding", "dilation", "kernel_size", "stride")
    rows = zip(sides, *(settings[name] for name in names), strict=True)
    return [
        (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for side, padding, dilation, kernel, stride in rows
    ]


def _correlation(
    input1: Tensor, input2: Tensor, kernel_size, patch_size, stride, padding, dilation, dilation_patch
) -> Tensor:
    B, _, H, W = input1.shape
    settings = dict(kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
    OH, OW = _window_counts((H, W), settings)
    nothing = 0 * (input1[:, :, :0].sum() + input2[:, :, :0].sum())
    result = input1.new_zeros(B, *patch_size, OH, OW) + nothing
    if result.numel() and input1.numel():
        windows = F.unfold(input1, **settings)
        for i, j in itertools.product(*map(range, patch_size)):
            y, x = (
                distance * number - distance * (count - 1) // 2
                for distance, number, count in zip(dilation_patch, (i, j), patch_size, strict=True)
            )
            if abs(y) < H and abs(x) < W:
                moved = F.unfold(F.pad(input2, (-x, x, -y, y)), **settings)
                result[:, i, j] += (windows * moved).sum(1).view(B, OH, OW)
    return result


def _draw_shifts(draw: Draw) -> Problem:
    B, T, G, S = draw.size(3), draw.size(8), draw.size(4, 0), draw.size(9)
    maps = draw.values(B, T, G * draw.size(3), S)
    kind = draw.pick(torch.int32, torch.int64)
    shift = draw.place(draw.whole(-5, 6, B, G), kind, can_expand=False)
    return Problem({"input": maps, "shift": shift}, ("input",), wide=wide_of(maps.dtype))


def _shifted(input: Tensor, shift: Tensor) -> Tensor:
    B, T, C, _ = input.shape
    result = _zeros(input, *input.shape)
    for b, t, c in itertools.product(range(B), range(T), range(C)):
        frame = t - int(shift[b, c // (C // shift.shape[1])])
        if 0 <= frame < T:
            result[b, t, c] = input[b, frame, c]
    return result


OPERATORS = (
    Operator(
        "border_align",
        border_align,
        _draw_borders,
        _border_maxima,
    ),
    Operator(
        "bezier_align",
        bezier_align,
        _draw_curves,
        _curve_means,
    ),
    Operator(
        "prroi_pool",
        prroi_pool,
        _draw_integrals,
        _integrals,
        _integral_bounds,
    ),
    Operator("psa_mask", psa_mask, _draw_masks, _masks, spoiled={"input": (1,)}),
    Operator(
        "correlation",
        correlation,
        _draw_maps,
        _correlation,
    ),
    Operator(
        "tin_shift",
        tin_shift,
        _draw_shifts,
        _shifted,
    ),
)


def test_correlation_of_no_pixels():
    x = torch.zeros(1, 2, 0, 3)
    assert correlation(x, x, *[(1, 1)] * 3, (1, 0), *[(1, 1)] * 2).tolist() == [[[[[0] * 3] * 2]]]


MAPS = torch.zeros(1, 4, 5, 6)
REFUSED = [
    (
        lambda: correlation(MAPS, MAPS, (9, 1), (1, 1), (1, 1), (1, 0), (1, 1), (1, 1)),
        r"input1 must hold a window of \[9, 1\] with its padding, got \[7, 6\]",
    ),
    (
        lambda: tin_shift(MAPS, torch.zeros(1, 4).int()),
        "C must be a multiple of the 4 groups of shift, got 5",
    ),
]
