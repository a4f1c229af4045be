"""deformable_aggregation_with_depth: by hand, and against the plain-torch definition."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import gradients
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.fuzz import sizes
from tests.fuzz.aggregation import (
    SPOILED,
    aggregation_bounds,
    draw_aggregation,
    launches_of_aggregation,
    make_case,
    of_shapes,
)
from tests.fuzz.problem import Draw, Operator, Problem, Seeded, gradient_sum, largest
from tests.fuzz.sampling import near_whole
from visdet.ops import (
    deformable_aggregation,
    deformable_aggregation_with_depth,
    deformable_aggregation_with_depth_reference,
)


def _draw_with_depth(draw: Draw) -> Problem:
    problem = draw_aggregation(draw)
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
    aggregation_bounds(problem, bounds)
    if "depth_probs" in bounds:
        given = problem.arguments
        channels = max(1, given["features"].shape[2])
        bounds["depth_probs"] = (
            channels * largest(given["features"]) * largest(given["weights"]) * gradient_sum(bounds)
        )
        if "locations" in bounds:
            bounds["locations"] *= max(1.0, channels)


@st.composite
def _launches_of_deformable_aggregation_with_depth(draw: st.DrawFn) -> dict[str, Any]:
    arguments = draw(launches_of_aggregation())
    features, locations = arguments.pop("features"), arguments.pop("locations")
    depth_probs = sizes.empty(*features.shape[:2], draw(st.sampled_from([0, 1, 3, 64])), dtype=features.dtype)
    arguments["locations"] = sizes.empty(*locations.shape[:-1], 3, dtype=locations.dtype)
    return {"features": features, "depth_probs": depth_probs, **arguments}


OPERATORS = (
    Operator(
        "deformable_aggregation_with_depth",
        deformable_aggregation_with_depth,
        _draw_with_depth,
        deformable_aggregation_with_depth_reference,
        _depth_bounds,
        reads_beside=("features", "depth_probs"),
        spoiled={**SPOILED, "depth_probs": ("rank", 0, 1)},
        aliases=("deformable_aggregation",),
        of_size=(
            lambda n: of_shapes(
                features=(n, 18, 4),
                depth_probs=(n, 18, 3),
                locations=(n, 5, 3, 2, 3),
                weights=(n, 5, 3, 2, 1, 2),
            ),
        ),
        launches=_launches_of_deformable_aggregation_with_depth(),
    ),
)


def make(B, Q, P, G, C, D, dtype=torch.float64, device="cpu"):
    """Return the operator's arguments; depths lie between whole numbers, a part of them outside."""
    features, shapes, starts, locations, weights = make_case(B, Q, P, G, C, dtype=dtype, device=device)
    draw = Seeded(1)
    depths = draw.uniform(*locations.shape[:-1], 1) * (D + 3) - 2
    depth_probs = draw.uniform(*features.shape[:2], D)
    locations = torch.cat([locations, depths.to(locations)], -1)
    return features, depth_probs.to(features), shapes, starts, locations, weights


def by_hand(location, device="cpu"):
    """Return result and gradients of a sample of a map of two texels with values 1 and 10 and three depths."""
    features = torch.tensor([1.0, 10.0], device=device).view(1, 2, 1)
    depth_probs = torch.tensor([[[0.5, 0.25, 0.125], [0.1, 0.2, 0.3]]], device=device)
    locations = torch.tensor(location, device=device).view(1, 1, 1, 1, 3)
    case = (features, depth_probs, [[(1, 2)]], [[0]], locations, torch.full((1,) * 6, 2.0, device=device))
    return gradients(deformable_aggregation_with_depth, case, torch.ones(1, 1, 1))


def test_one_pair_by_hand(device):
    # At x = 0.4 the corners weigh 0.7 and 0.3, and at depth 1.25 the first texel has 0.21875, the second one 0.225.
    output, _ = by_hand((0.4, 0.5, 1.25), device)
    assert output.item() == pytest.approx(2 * (0.7 * 0.21875 + 0.3 * 10 * 0.225))


@pytest.mark.parametrize(
    ("depth", "share"), [(-0.25, 0.75 * 0.5), (0.0, 0.5), (2.0, 0.125), (2.75, 0.25 * 0.125)], ids=str
)
def test_depths_outside_count_as_zero(depth, share, device):
    assert by_hand((0.25, 0.5, depth), device)[0].item() == pytest.approx(2 * share)


@pytest.mark.parametrize("depth", [-1.0, 3.0, -1e30, 1e30, math.nan, math.inf, -math.inf])
def test_a_pair_beyond_the_depths_has_no_part(depth, device):
    output, grads = by_hand((0.4, 0.5, depth), device)
    assert output.item() == 0 and not any(grad.any() for grad in grads)


def test_certain_depths_are_no_depths(device):
    features, depth_probs, *tables, locations, weights = make(2, 5, 3, 2, 8, 4, torch.float32, device)
    locations[..., 2] = locations[..., 2].clamp(0, 3)
    plain = deformable_aggregation(features, *tables, locations[..., :2], weights)
    ones = torch.ones_like(depth_probs)
    found = deformable_aggregation_with_depth(features, ones, *tables, locations, weights)
    assert_close(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.slow
def test_more_than_two_to_the_31_numbers():
    """The last image of a batch whose weights have 1.1 * 2^31 numbers."""
    Q, P, V, L, G, B = 1024, 500, 3, 4, 8, 48
    shapes = torch.tensor([[(4, 4)] * L] * V)
    starts = torch.arange(V * L).view(V, L) * 16
    case = (
        torch.rand(1, V * L * 16, G, device="cuda").expand(B, -1, -1),
        torch.rand(1, V * L * 16, 4, device="cuda").expand(B, -1, -1),
        *(shapes, starts),
        torch.rand(1, Q, P, V, 3, device="cuda").expand(B, -1, -1, -1, -1),
        torch.rand(1, Q, P, V, L, G, device="cuda").expand(B, -1, -1, -1, -1, -1),
    )
    output = deformable_aggregation_with_depth(*case)
    assert torch.equal(output[0], output[-1]) and output[0].any()
