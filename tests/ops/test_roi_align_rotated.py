"""roi_align_rotated, riroi_align_rotated, rotated_feature_align and active_rotated_filter beside slow loops."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import HALVES, Draw, Operator, Problem, wide_of
from tests.fuzz.regions import ALIGNED, draw_regions, region_bounds, samples_of
from tests.fuzz.sampling import is_unclear, sampled
from visdet.ops import (
    active_rotated_filter,
    riroi_align_rotated,
    roi_align_rotated,
    rotated_feature_align,
)

NAMES = {"input": "features", "output_size": "out_size", "sampling_ratio": "num_samples"}


def _in_two_roundings(problem: Problem, name: str) -> Problem:
    """Return the problem, whose results of 16 bits may be rounded twice."""
    dtype = problem.arguments[name].dtype
    if dtype in HALVES:
        problem.epsilon, problem.error_factor = torch.finfo(dtype).eps, 4.0
    return problem


def _draw_pooled(draw: Draw) -> Problem:
    problem = draw_regions(draw, "riroi_align_rotated")
    given = {NAMES.get(name, name): value for name, value in problem.arguments.items() if name != "aligned"}
    C = given["features"].shape[1]
    given["num_orientations"] = draw.pick(*(G for G in range(1, C + 1) if C % G == 0))
    problem.arguments, problem.differentiable = given, ("features",)
    problem.skip["features"] = problem.skip.pop("input")
    return _in_two_roundings(problem, "features")


def _means(input: Tensor, rois: Tensor, output_size: tuple[int, int], **settings: Any) -> Tensor:
    """Return the mean of the samples in each bin, or 0 where there are none."""
    C, (PH, PW) = input.shape[1], output_size
    rows = [input.new_zeros(0, C, PH, PW) + input[:0].sum()]
    for region in rois.tolist():
        y, x = (places.to(input) for places in samples_of(region, output_size, **settings))
        values = sampled(input[int(region[0])], y.flatten(), x.flatten())
        bins = values.view(C, PH, len(y) // PH, PW, y.shape[1] // PW)
        rows.append(bins.sum((2, 4))[None] / max(y.numel() // (PH * PW), 1))
    return torch.cat(rows)


def _pooled(
    features: Tensor, rois: Tensor, out_size: Any, num_samples: int, num_orientations: int, **settings: Any
) -> Tensor:
    G = num_orientations
    means = _means(features, rois, out_size, sampling_ratio=num_samples, aligned=False, **settings)
    turn = rois[:, 5] * G / (2 * math.pi)
    first = turn.floor()
    part = (turn - first)[:, None, None, None, None]
    orientation = torch.arange(G, device=rois.device) - first.long()[:, None]  # [N, G]
    of_orientation = means.unflatten(1, (-1, G)).movedim(2, 1)  # [N, G, C / G, PH, PW]
    region = torch.arange(len(rois), device=rois.device)[:, None]
    before, after = (of_orientation[region, (orientation + i) % G] for i in (0, 1))
    return ((1 - part) * before + part * after).movedim(1, 2).flatten(1, 2)


def _points(best_rbboxes: Tensor, spatial_scale: float, points: int) -> tuple[Tensor, Tensor]:
    """Return y and x [B, H, W, points] of the samples of each box."""
    y, x, w, h, angle = (best_rbboxes * best_rbboxes.new_tensor([spatial_scale] * 4 + [1])).unbind(3)
    signs = [(0, 0), (1, 1), (1, -1), (-1, -1), (-1, 1)][:points]
    below = [y + i * w / 2 * angle.sin() + j * h / 2 * angle.cos() if i else y for i, j in signs]
    right = [x + i * w / 2 * angle.cos() - j * h / 2 * angle.sin() if i else x for i, j in signs]
    return torch.stack(below, 3), torch.stack(right, 3)


def _draw_aligned(draw: Draw) -> Problem:
    B, C, H, W = draw.size(3), draw.size(6), draw.size(12), draw.size(12)
    features = draw.values(B, C, H, W)
    settings = {"spatial_scale": draw.pick(1.0, 0.5, 0.125), "points": draw.pick(1, 5)}
    numbers = [draw.uniform(-4, H + 3, B, H, W, 1), draw.uniform(-4, W + 3, B, H, W, 1)]
    numbers.append(draw.uniform(-1, 12, B, H, W, 2))
    eighths = (torch.cat(numbers, 3) * 8).round() / 8 / settings["spatial_scale"]
    boxes = torch.cat([eighths, (draw.uniform(-7, 7, B, H, W, 1) * 8).round() / 8], 3)
    boxes = draw.place(boxes, wide_of(features.dtype), can_expand=False, bad=0.5)
    y, x = _points(boxes.double(), **settings)
    is_near = is_unclear(y, x, H, W, False)
    if draw.has_bad_numbers:  # Samples are clamped before they are scaled to -1..1, which rounds.
        is_near |= is_unclear(y.clamp(0, max(H - 1, 0)), x.clamp(0, max(W - 1, 0)), H, W, True)
    boxes[is_near.any(3)] = math.nan
    given = {"features": features, "best_rbboxes": boxes, **settings}
    problem = Problem(
        given, ("features",), ("best_rbboxes",), wide=wide_of(features.dtype), error_factor=2000.0
    )
    return _in_two_roundings(problem, "features")


def _aligned(features: Tensor, best_rbboxes: Tensor, spatial_scale: float, points: int) -> Tensor:
    y, x = (places.flatten(1) for places in _points(best_rbboxes, spatial_scale, points))
    if features.numel() == 0:
        return features + 0
    rows = [
        sampled(*one).view(*features.shape[1:], points).sum(3) for one in zip(features, y, x, strict=True)
    ]
    return features + torch.stack(rows)


def _draw_filters(draw: Draw) -> Problem:
    M, C, G, H, W, R = (draw.size(limit) for limit in (4, 4, 8, 3, 3, 8))
    rotations = [torch.randperm(G * H * W, generator=draw.generator) + 1 for _ in range(R)]
    indices = torch.stack(rotations, 1) if R else torch.zeros(G * H * W, 0, dtype=torch.int64)
    kind = draw.pick(torch.int32, torch.int64, torch.uint8)
    given = {
        "input": draw.values(M, C, G, H, W),
        "indices": draw.place(indices.view(G, H, W, R), kind, can_expand=False),
    }
    return Problem(given, ("input",), wide=wide_of(given["input"].dtype))


def _filters(input: Tensor, indices: Tensor) -> Tensor:
    M, C, G, H, W = input.shape
    R = indices.shape[3]
    rotated = input.new_zeros(M, R, C, G * H * W) + 0 * input.sum()
    for r in range(R):
        for number, place in enumerate(indices[..., r].flatten().tolist()):
            rotated[:, r, :, place - 1] = input.flatten(2)[:, :, number]
    return rotated.view(M * R, C * G, H, W)


OPERATORS = (
    Operator(
        "roi_align_rotated",
        roi_align_rotated,
        lambda draw: draw_regions(draw, "roi_align_rotated"),
        _means,
        region_bounds,
        launches=sizes.arguments(rois="N 6 float32", spatial_scale=0.25, **ALIGNED),
        shares_a_scale=True,
    ),
    Operator(
        "riroi_align_rotated",
        riroi_align_rotated,
        _draw_pooled,
        _pooled,
        shares_a_scale=True,
    ),
    Operator(
        "rotated_feature_align",
        rotated_feature_align,
        _draw_aligned,
        _aligned,
    ),
    Operator(
        "active_rotated_filter",
        active_rotated_filter,
        _draw_filters,
        _filters,
        spoiled={"input": (3, 4), "indices": (1, 2)},
    ),
)


def test_a_point_outside_the_map_reads_no_pixel():
    x = torch.ones(1, 1, 3, 3)
    x[0, 0, 0, 0] = math.nan
    assert rotated_feature_align(x, torch.full((1, 3, 3, 5), 99.0), 1.0, 5).isnan().sum() == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_rotated_filters_are_rounded_once(dtype):
    filters = torch.ones(1, 1, 1, 1, 1, dtype=dtype, requires_grad=True)
    rotated = active_rotated_filter(filters, torch.ones(1, 1, 1, 9).int())
    epsilon = torch.finfo(dtype).eps
    grads = torch.tensor([1.0] + [epsilon / 4] * 8, dtype=dtype)
    (found,) = torch.autograd.grad(rotated.flatten(), filters, grads)
    assert found.item() == 1 + 2 * epsilon


X, ROIS = torch.zeros(2, 8, 4, 5), torch.zeros(3, 6)


REFUSED = [
    (lambda: riroi_align_rotated(X, ROIS, 2, 1.0, 0, 3), "num_orientations must divide .*got 3 for 8"),
]
