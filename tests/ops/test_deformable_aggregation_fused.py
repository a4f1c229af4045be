"""deformable_aggregation_fused: by hand, against the plain-torch definition, and its promises."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from calls import assert_matches
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz import sizes
from tests.fuzz.aggregation import (
    TWO_CAMERAS,
    aggregation_sizes,
    camera_tables,
    launches_of_aggregation,
)
from tests.fuzz.problem import HALVES, Draw, Operator, Problem, Seeded, gradient_sum, largest, rand, wide_of
from tests.fuzz.sampling import longest_side, near_whole, starts_of
from visdet.ops import (
    deformable_aggregation_fused,
    deformable_aggregation_fused_reference,
)


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
    B, Q, P, V, L, G, group, side = aggregation_sizes(draw)
    shapes, starts, rows = camera_tables(draw, V, L, side)
    features = draw.values(B, rows, G * group)
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
    logits = draw.place(logits, narrow, bad=0.5)
    camera_logits = draw.values(B, V, L, P, G, dtype=draw.dtype(narrow, narrow, wide))
    keep = draw.place(draw.uniform(0, 1, B, Q, V, P) < 0.8, can_expand=False) if draw.chance(0.4) else None
    arguments = {
        "features": features,
        "level_shapes": draw.table(shapes),
        "level_starts": draw.table(starts),
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
        error_factor=256.0 + 64 * longest_side(shapes) + 0.5 * Q * P,
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
    side = longest_side(shapes)
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
def _launches_of_deformable_aggregation_fused(draw: st.DrawFn) -> dict[str, Any]:
    given = draw(launches_of_aggregation())
    B, Q, P, V, L, G = given.pop("weights").shape
    empty = partial(sizes.empty, dtype=given.pop("locations").dtype)
    of_cameras = draw(st.booleans())
    return {
        **given,
        "key_points": empty(B, Q, P, 3),
        "projection": empty(B, V, 4, 4),
        "image_wh": empty(B, V, 2),
        "logits": empty(B, Q, L, P, G) if of_cameras else empty(B, Q, V, L, P, G),
        "camera_logits": empty(B, V, L, P, G) if of_cameras else None,
    }


OPERATORS = (
    Operator(
        "deformable_aggregation_fused",
        deformable_aggregation_fused,
        _draw_fused,
        _fused_reference,
        _fused_bounds,
        reads_beside=("features",),
        spoiled={"logits": ("rank", 0, 1), "level_shapes": ("rank", 2), "level_starts": ("None",)},
        launches=_launches_of_deformable_aggregation_fused(),
        aliases=("deformable_aggregation",),
        of_size=(
            lambda n: Problem(
                {
                    "features": rand(n, 18, 4),
                    **TWO_CAMERAS,
                    "key_points": rand(n, 5, 3, 3),
                    "projection": torch.eye(4).repeat(n, 2, 1, 1),
                    "image_wh": rand(n, 2, 2),
                    "logits": rand(n, 5, 2, 1, 3, 2),
                },
                ("features", "key_points", "logits"),
            ),
        ),
    ),
)


SHAPES = [[(8, 16), (4, 8)], [(6, 9), (2, 2)]]  # two cameras, two levels
# Camera 0 looks along +x, camera 1 along -x: u = 32 + 30 * lateral / depth, in images of 64 x 32 pixels.
FORWARD = [[32.0, -30, 0, 160], [16, 0, -30, 80], [1, 0, 0, 5], [0, 0, 0, 1]]
BACKWARD = [[-32.0, 30, 0, 160], [-16, 0, -30, 80], [-1, 0, 0, 5], [0, 0, 0, 1]]


def make_case(B, Q, P, G, C, *, cameras=True, keep=True, dtype=torch.float64, logit_dtype=None, device="cpu"):
    """Return deformable_aggregation_fused's arguments, half of the points in front of each camera."""
    draw, wide = Seeded().normal, wide_of(dtype)
    shapes = torch.tensor(SHAPES)
    V, L = shapes.shape[:2]
    starts, rows = starts_of(shapes)
    logit_dtype = logit_dtype or wide
    matrices = torch.tensor([FORWARD, BACKWARD]).expand(B, -1, -1, -1) + 0.01 * draw(B, V, 4, 4)
    return (
        draw(B, rows, C).to(device, dtype),
        shapes,
        starts,
        (3 * draw(B, Q, P, 3)).to(device, wide),
        matrices.to(device, wide),
        torch.tensor([64.0, 32.0], dtype=wide).expand(B, V, 2).to(device),
        draw(*((B, Q, L, P, G) if cameras else (B, Q, V, L, P, G))).to(device, logit_dtype),
        draw(B, V, L, P, G).to(device, logit_dtype) if cameras else None,
        (draw(B, Q, V, P) > -0.5).to(device) if keep else None,
        1.5,
    )


def test_one_point_by_hand(device):
    # Straight ahead of camera 0, behind camera 1; two levels of one texel each. Logits 0 and log 3 over the two levels
    # of camera 0, and -inf for camera 1: weights 1/4 and 3/4.
    features = torch.tensor([[[4.0], [8.0], [100.0], [100.0]]], device=device)
    shapes = [[(1, 1), (1, 1)]] * 2
    logits = torch.zeros(1, 1, 2, 2, 1, 1, device=device)
    logits[0, 0, 0, 1] = math.log(3)
    logits[0, 0, 1] = -math.inf
    projection = torch.tensor([[FORWARD, BACKWARD]], device=device)
    image_wh = torch.tensor([[[64.0, 32.0]] * 2], device=device)
    point = torch.tensor([[[[10.0, 0.0, 0.0]]]], device=device)
    out = deformable_aggregation_fused(
        features, shapes, [[0, 1], [2, 3]], point, projection, image_wh, logits, keep_scale=2.0
    )
    assert_close(out, torch.tensor([[[2 * (0.25 * 4 + 0.75 * 8)]]], device=device))
    # The same where the projection already ends in 0..1.
    scale = torch.tensor([1 / 64, 1 / 32, 1, 1], device=device)[:, None]
    scaled = deformable_aggregation_fused(
        features, shapes, [[0, 1], [2, 3]], point, projection * scale, None, logits
    )
    assert_close(scaled, out / 2)


@pytest.mark.parametrize("channels", range(1, 41))
def test_any_number_of_channels_a_group(channels, device):
    for G in (1, 4, 9):
        case = make_case(2, 5, 3, G, G * channels, device=device)
        of = (0, 3, 6, 7)  # the features, the key points and the logits
        assert_matches(
            deformable_aggregation_fused, deformable_aggregation_fused_reference, case, 1e-11, of=of
        )


def test_a_calibration_has_a_gradient(device):
    case = make_case(2, 5, 3, 2, 8, device=device)
    assert_matches(
        deformable_aggregation_fused, deformable_aggregation_fused_reference, case, 1e-11, of=(4, 5)
    )
