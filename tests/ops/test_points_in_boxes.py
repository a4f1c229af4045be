"""Points in 3-D boxes and their pooling."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import Draw, Operator, Problem, linear_problem, nothing, rand, wrong_places
from visdet.ops import points_in_boxes_all, points_in_boxes_part, roiaware_pool3d, roipoint_pool3d

# Rounding may move a point that is so near to a side of a box or a voxel. Such points are moved far away.
NEAR, FAR = 1e-4, 100.0


def _boxes(draw: Draw, *shape: int) -> Tensor:
    parts = draw.uniform(-2, 2, *shape, 3), draw.uniform(0.2, 3, *shape, 3), draw.uniform(-4, 4, *shape, 1)
    return torch.cat(parts, -1)


def _draw_boxes(draw: Draw) -> Problem:
    B, N, M, dtype = draw.size(3), draw.size(60), draw.size(8), draw.dtype()
    points = draw.with_bad_numbers(draw.uniform(-3, 3, B, N, 3))
    return Problem(
        {
            "points": draw.place(points, dtype),
            "boxes": draw.place(_boxes(draw, B, M), dtype, bad=0.5),
        }
    )


def _turned(apart: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and y of differences [..., 3] along the sides of boxes that are turned by an angle."""
    cos, sin = angle.cos(), angle.sin()
    return apart[..., 0] * cos + apart[..., 1] * sin, apart[..., 1] * cos - apart[..., 0] * sin


def _margins(points: Tensor, boxes: Tensor) -> Tensor:  # [B, N, 3], [B, M, 7] -> [B, N, M]
    """Return how far each point is inside each box; negative outside, NaN where a number is not finite."""
    around = boxes.double()[:, None]
    apart, half = points.double()[:, :, None] - around[..., :3], around[..., 3:6] / 2
    x, y = _turned(apart, around[..., 6])
    along = torch.stack([x, y, apart[..., 2] - half[..., 2]], 3)
    margin = (half - along.abs()).amin(3)
    is_sound = points.isfinite().all(2)[:, :, None] & boxes.isfinite().all(2)[:, None]
    return torch.where(is_sound, margin, torch.nan)


def _same_insides(problem: Problem, got: tuple[Tensor], expected: Any) -> str:
    margin = _margins(**problem.arguments)
    # A number of 1e30 leaves no digits for the distance from a side.
    is_clear = (margin.abs() > NEAR) & (margin.abs() < 1e4)
    found = got[0]
    if found.dim() == 3:
        is_wrong = is_clear & ((found == 1) != (margin > 0))
        return wrong_places("point and box", is_wrong)
    if margin.shape[2] == 0:
        return "" if bool((found == -1).all()) else "a point is in a box, and there are none"
    is_inside = margin > 0
    wanted = torch.where(is_inside.any(2), is_inside.int().argmax(2), -1)
    is_wrong = is_clear.all(2) & (found != wanted)
    return wrong_places("points", is_wrong)


def _draw_pooled(draw: Draw) -> Problem:
    B, N, M, dtype = draw.size(3), draw.size(60), draw.size(8), draw.dtype()
    points = draw.place(draw.uniform(-3, 3, B, N, 3), dtype, can_expand=False)
    boxes = draw.place(_boxes(draw, B, M), dtype, can_expand=False)
    points[(_margins(points, boxes).abs() < NEAR).any(2)] = FAR
    given = {
        "points": points,
        "point_features": draw.values(B, N, draw.size(4)),
        "boxes3d": boxes,
        "num_sampled_points": draw.size(20, 0),
    }
    return linear_problem("point_features", given, "points")


def _pooled(**given: Any) -> tuple[Tensor, Tensor]:
    points, is_empty = roipoint_pool3d(**given)
    return points, is_empty.to(points.dtype)


def _sampled(
    points: Tensor, point_features: Tensor, boxes3d: Tensor, num_sampled_points: int
) -> tuple[Tensor, Tensor]:
    values = torch.cat([points, point_features], 2)
    is_inside = _margins(points.detach(), boxes3d).movedim(2, 1) > 0  # [B, M, N]
    pooled = values.new_zeros(*is_inside.shape[:2], num_sampled_points, values.shape[2]) + values[:0].sum()
    for b, m in is_inside.any(2).nonzero().tolist():
        inside = is_inside[b, m].nonzero()[:, 0]
        slots = torch.arange(num_sampled_points, device=inside.device)
        pooled[b, m] = values[b, inside[slots % len(inside)]]
    return pooled, (~is_inside.any(2)).to(values)


def _draw_voxels_of_boxes(draw: Draw) -> Problem:
    N, M, dtype = draw.size(60), draw.size(6), draw.dtype()
    size, mode = draw.pick(draw.size(4, 0), [draw.size(4, 0) for _ in range(3)]), draw.pick("max", "avg")
    pts = draw.place(draw.uniform(-3, 3, N, 3), dtype, can_expand=False, bad=0.5)
    rois = draw.place(_boxes(draw, M), dtype, bad=0.5)
    places, _ = _places_in_boxes(rois.double(), pts.double(), size)
    is_near = ((places - places.round()).abs() < NEAR * (1 + places.abs())) & (places.abs() < 1e4)
    pts[is_near.any(2).any(0)] = FAR
    given = {
        "rois": rois,
        "pts": pts,
        "pts_feature": draw.values(N, draw.size(4)),
        "out_size": size,
        "max_pts_per_voxel": draw.pick(1, 2, 5, 128),
        "mode": mode,
    }
    problem = linear_problem("pts_feature", given)
    problem.positions = ("rois", "pts", *(["pts_feature"] if mode == "max" else []))
    return problem


def _places_in_boxes(rois: Tensor, pts: Tensor, size: Any) -> tuple[Tensor, Tensor]:  # [M, N, 3], [3]
    """Return the places of points in units of the voxels of each box, from its corner, and the numbers of voxels."""
    counts = torch.tensor([size] * 3 if isinstance(size, int) else size, device=rois.device)
    apart = pts - rois[:, None, :3]
    x, y = _turned(apart, rois[:, None, 6])
    sides = rois[:, None, 3:6]
    return torch.stack(
        [x + sides[..., 0] / 2, y + sides[..., 1] / 2, apart[..., 2]], 2
    ) / sides * counts, counts


def _pooled_in_boxes(
    rois: Tensor, pts: Tensor, pts_feature: Tensor, out_size: Any, max_pts_per_voxel: int, mode: str
) -> Tensor:
    places, counts = _places_in_boxes(rois, pts, out_size)
    pooled = pts_feature.new_zeros(len(rois), *counts.tolist(), pts_feature.shape[1]) + pts_feature.sum() * 0
    is_inside = ((places > 0) & (places < counts) & (rois[:, None, 3:6] > 0)).all(2)
    for m in range(len(rois)):
        members: dict[tuple[int, ...], list[int]] = {}
        for n in is_inside[m].nonzero()[:, 0].tolist():
            members.setdefault(tuple(places[m, n].long().tolist()), []).append(n)
        for voxel, points in members.items():
            values = pts_feature[points[: max_pts_per_voxel - 1]]
            if len(values):
                pooled[(m, *voxel)] = values.mean(0) if mode == "avg" else _first_maximum(values)
    return pooled


def _first_maximum(values: Tensor) -> Tensor:  # [K, C] -> [C]
    """Return the largest numbers, of equal ones the first, and 0 where all are NaN or minus infinity."""
    known = torch.where(values.isnan(), -torch.inf, values).detach()
    is_first = (known == known.amax(0)) & (known > -torch.inf)
    is_first &= is_first.cumsum(0) == 1
    return torch.where(is_first, values, 0).sum(0)


def _sized(B: int, N: int, M: int) -> Problem:
    return Problem({"points": rand(B, N, 3), "boxes": rand(B, M, 7)})


OPERATORS = (
    *(
        Operator(
            call.__name__,
            call,
            _draw_boxes,
            nothing,
            compare=_same_insides,
            of_size=(lambda n: _sized(n, 3, 4), lambda n: _sized(2, n, 4), lambda n: _sized(2, 3, n)),
            launches=sizes.arguments(points="B N 3", boxes="B M 7"),
        )
        for call in (points_in_boxes_part, points_in_boxes_all)
    ),
    Operator(
        "roipoint_pool3d",
        _pooled,
        _draw_pooled,
        _sampled,
    ),
    Operator(
        "roiaware_pool3d",
        roiaware_pool3d,
        _draw_voxels_of_boxes,
        _pooled_in_boxes,
    ),
)


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def test_sides_and_bottoms(device):
    box = torch.tensor([[[0.0, 0, 0, 2, 2, 2, 0]]], device=device)
    points = torch.tensor([[[0.0, 0, 0], [0, 0, 2], [1, 0, 1], [0, -1, 1], [torch.nan, 0, 0]]], device=device)
    assert points_in_boxes_part(points, box).tolist() == [[0, 0, -1, -1, -1]]
    turned = torch.tensor([[[0.0, 0, 0, 4, 1, 2, math.pi / 2]]], device=device)
    along = torch.tensor([[[0.0, 1.8, 1], [1.8, 0, 1]]], device=device)
    assert points_in_boxes_part(along, turned).tolist() == [[0, -1]]


@pytest.mark.filterwarnings("ignore:.*[Oo]verriding")
def test_an_error_of_torch_within_a_kernel_is_in_the_message():
    def cos(x):
        raise RuntimeError("no cosine today")

    points, boxes = torch.ones(1, 60, 3), torch.ones(1, 7, 7)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("cos", cos, "CPU")
        # Before torch 2.13, no function returns the text, which is on stderr.
        text = "no cosine today" if TORCH >= (2, 13) else "the reason is on stderr"
        with pytest.raises(RuntimeError, match=f"(?s)aten::cos: .*{text}"):
            points_in_boxes_all(points, boxes)
    assert points_in_boxes_all(points, boxes).any()
