"""Convex hulls of point sets, their overlaps and smallest boxes, points in polygons, chamfer distances, and the
differentiable overlap of rotated boxes, beside slow computations in plain Python."""

import cmath
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.boxes import boxes_in_space, overlap
from tests.fuzz.polygons import (
    IS_NAN,
    Points,
    area,
    by_differences,
    crosses_itself,
    derivatives,
    hull,
    points_of,
    rectangle,
    shared,
    sides,
    touches,
)
from tests.fuzz.problem import EXTREME, Draw, Operator, Problem, largest, nothing, rand, wide_of, wrong_places
from visdet.ops import (
    chamfer_distance,
    convex_giou,
    convex_iou,
    diff_iou_rotated_2d,
    diff_iou_rotated_3d,
    min_area_polygons,
    points_in_polygons,
)


def _draw_pairs(is_flat: bool, names: tuple[str, str]) -> Callable[[Draw], Problem]:
    def draw_problem(draw: Draw) -> Problem:
        shape, dtype = (draw.size(3), draw.size(6)), draw.dtype()
        boxes = [boxes_in_space(draw, *shape, is_flat=is_flat) for _ in names]
        if draw.chance(0.2):
            boxes[1][:, ::2] = boxes[0][:, ::2]
        given = {name: draw.place(one, dtype, bad=0.3) for name, one in zip(names, boxes, strict=True)}
        return Problem(given, names, names, wide=torch.float64, epsilon=1e-9)

    return draw_problem


def _pairs(**given: Tensor) -> Tensor:
    return by_differences(lambda one, other: overlap(one, other, "pair"), *given.values())


def _pair_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    bounds["output"] = 1.0
    for name in problem.differentiable:
        bounds[name] = 1e4 * bounds.get("grad_total", 0.0)


def _point_sets(draw: Draw, N: int) -> Tensor:  # [N, 18]
    """Return nine points each. In some problems many are equal or lie on a line."""
    center, spread = draw.uniform(-20, 20, N, 1, 2), draw.uniform(0.5, draw.pick(2.0, 20.0), N, 1, 1)
    points = center + spread * draw.uniform(-1, 1, N, 9, 2)
    kind = draw.random.random()
    if kind < 0.3:
        points = points.round()
    elif kind < 0.4:  # on lines, or all in one place
        points = center.round() + draw.whole(-4, 5, N, 9, 1) * draw.whole(-1, 2, N, 1, 2)
    return points.flatten(1).double()


def _quadrilaterals(draw: Draw, N: int, like: Tensor | None = None) -> Tensor:  # [N, 8]
    """Return quadrilaterals either way round, some concave and some without area."""
    center, sides, angle = draw.uniform(-20, 20, N, 2), draw.uniform(0.2, 20, N, 2), draw.uniform(-4, 4, N, 1)
    if like is not None:
        center = like[:, :2] + draw.uniform(-4, 4, N, 2)
    if draw.chance(0.3):
        center, sides, angle = center.round(), sides.round(), (angle * 2 / math.pi).round() * math.pi / 2
    rows = [rectangle(*numbers) for numbers in torch.cat([center, sides, angle], 1).tolist()]
    corners = torch.view_as_real(torch.tensor(rows, dtype=torch.complex128).view(N, 4))
    if draw.chance(0.2):
        corners[:, 2] = center + (corners[:, 0] - center) * draw.random.uniform(0, 0.8)
    if draw.chance(0.5):
        corners = corners.flip(1)
    return corners.flatten(1)


def _draw_sets(draw: Draw, is_paired: bool) -> Problem:
    N, dtype = draw.size(8), draw.dtype()
    points = _point_sets(draw, N)
    polygons = _quadrilaterals(draw, N, points) if is_paired else _quadrilaterals(draw, draw.size(6))
    scale = draw.pick(1.0, 1.0, 1.0, 1e-4)  # The differences of the reference suit pixels.
    pointsets = draw.place(points * scale, dtype, bad=0.5)
    polygons = draw.with_bad_numbers(polygons * scale)
    given = {"pointsets": pointsets, "polygons": draw.place(polygons, draw.dtype(dtype, torch.float32))}
    skip: dict[str, Tensor | bool] = {"output 1": scale != 1}
    return Problem(given, positions=tuple(given), wide=torch.float64, epsilon=1e-9, skip=skip)


def _iou(numbers: list[float], corners: list[float], is_generalised: bool = False) -> float:
    """Return the IoU or GIoU of a set's hull and a quadrilateral. NaN stands for what is not compared."""
    if not all(map(math.isfinite, numbers + corners)):
        return IS_NAN
    one, other = hull(points_of(numbers)), points_of(corners)
    if max(map(abs, numbers + corners)) > EXTREME or crosses_itself(other):
        return math.nan
    common = shared(other, one) if len(one) > 2 else 0.0
    union = area(one) + abs(area(other)) - common
    iou = common / union if union > 0 else 0.0
    around = area(hull(one + other)) if is_generalised else 0.0
    return iou - (around - union) / around if around > 0 else iou


def _iou_table(pointsets: Tensor, polygons: Tensor) -> Tensor:
    table = [[_iou(one, other) for other in polygons.tolist()] for one in pointsets.tolist()]
    return pointsets.new_tensor(table).view(len(pointsets), len(polygons))


def _giou_rows(pointsets: Tensor, polygons: Tensor) -> tuple[Tensor, Tensor]:
    def giou(one: list[float], other: list[float]) -> float:
        return _iou(one, other, True)

    rows = list(zip(pointsets.tolist(), polygons.tolist(), strict=True))
    gradient = derivatives(giou, pointsets, polygons)[0]
    for n, (one, other) in enumerate(rows):  # mmcv's derivatives are between those of both sides
        if not all(map(math.isfinite, one + other)) or touches(points_of(one), points_of(other)):
            gradient[n] = math.nan
    return pointsets.new_tensor([giou(*row) for row in rows]), gradient


def _marked_giou(pointsets: Tensor, polygons: Tensor) -> tuple[Tensor, Tensor]:
    giou, gradient = convex_giou(pointsets, polygons)
    return giou.nan_to_num(IS_NAN), gradient


def _bounds(problem: Problem, bounds: dict[str, float]) -> None:
    bounds.update(dict.fromkeys(bounds, 1.0))


def _giou_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    _bounds(problem, bounds)
    problem.absolute["output 1"] = 2e-4


def _draw_least(draw: Draw) -> Problem:
    points = draw.place(_point_sets(draw, draw.size(20)), draw.dtype(), bad=0.5)
    return Problem({"pointsets": points}, positions=("pointsets",), wide=torch.float64, epsilon=1e-9)


def _least_box(points: Points) -> list[float]:
    """Return the corners by trying all edges of the hull. NaN stands for a choice that depends on rounding."""
    corners = hull(points)
    first = corners.index(min(corners, key=lambda point: (point.imag, point.real)))
    found = []
    for a, b in sides(corners[first:] + corners[:first]):
        turn = cmath.rect(1, cmath.phase(b - a) % (math.pi / 2))
        across = np.array(corners) / turn
        x, y = across.real, across.imag
        w, h = np.ptp(x), 1j * np.ptp(y)
        box = turn * (x.min() + 1j * y.min() + np.array([w, 0, h, w + h]))
        found.append((abs(w * h), box.view(float).tolist()))
    least = min(size for size, _ in found)
    if any(least * (1 + 1e-7) < size < least * (1 + 1e-5) for size, _ in found):
        return [math.nan] * 8
    return next(box for size, box in found if size <= least * (1 + 1e-6))


def _least_boxes(pointsets: Tensor) -> Tensor:
    rows = []
    for numbers in pointsets.tolist():
        if not all(map(math.isfinite, numbers)):
            rows.append([IS_NAN] * 8)
        elif max(map(abs, numbers)) > EXTREME:
            rows.append([math.nan] * 8)
        else:
            rows.append(_least_box(points_of(numbers)))
    return pointsets.new_tensor(rows).view(len(rows), 8)


def _draw_inside(draw: Draw) -> Problem:
    N, M, dtype = draw.size(60), draw.size(8), draw.dtype()
    points = draw.uniform(-25, 25, N, 2)
    given = {
        "points": draw.place(points.round() if draw.chance(0.3) else points, dtype, bad=0.5),
        "polygons": draw.place(_quadrilaterals(draw, M), dtype, bad=0.5),
    }
    return Problem(given)


def _same_insides(problem: Problem, got: tuple[Tensor], expected: Any) -> str:
    """Compare with the sum of the angles at which a point sees the sides, unless it is next to one."""
    points, polygons = (problem.arguments[name].double() for name in ("points", "polygons"))
    corners = torch.complex(*(polygons.view(-1, 4, 2) - points[:, None, None]).unbind(3))  # [N, M, 4]
    after = corners.roll(-1, 2)
    side = after - corners
    turns = (after * corners.conj()).angle().sum(2) / (2 * math.pi)
    part = (-corners / side).real.nan_to_num(0.0).clamp(0, 1)
    apart = (corners + part * side).abs().amin(2)
    is_sound = (polygons.abs() < EXTREME).all(1)
    is_outside = ~points.isfinite().all(1)[:, None] & is_sound
    is_sound = is_sound & (points.abs() < EXTREME).all(1)[:, None]
    wanted = torch.where(is_outside, 0.0, turns.round().abs())
    is_wrong = (got[0] != wanted) & (is_outside | is_sound & (apart > 1e-3))
    return wrong_places("point and polygon", is_wrong)


def _draw_chamfer(draw: Draw) -> Problem:
    B, N, M, dtype = draw.size(3), draw.size(20), draw.size(20), draw.dtype()
    scale, is_whole = draw.pick(1.0, 1.0, 300.0), draw.chance(0.4)
    sets = [draw.uniform(-9, 9, B, count, 2) * scale for count in (N, M)]
    sets = [draw.with_bad_numbers(one.round() if is_whole else one, 0.3) for one in sets]
    given = {name: draw.place(one, dtype) for name, one in zip(("xyz1", "xyz2"), sets, strict=True)}
    apart = _table(**{name: one.double() for name, one in given.items()})
    unsure = []  # rows in which rounding may choose another point
    for table in (apart, apart.transpose(1, 2)):
        least = table.amin(2, keepdim=True) if table.shape[2] else table
        is_near = table <= least * (1 + 4 * torch.finfo(dtype).eps)
        exact = is_whole and scale == 1.0
        unsure.append(
            (is_near.sum(2) > 1) & (not exact) | ~table.isfinite().all(2) | (table > EXTREME**2).any(2)
        )
    skip: dict[str, Any] = {"output 2": unsure[0], "output 3": unsure[1]}
    skip |= dict.fromkeys(given, any(bool(rows.any()) for rows in unsure))
    wide = wide_of(dtype)
    rounding = 4 * torch.finfo(wide).eps * largest(apart, EXTREME**2)
    absolute = {"output": rounding, "output 1": rounding}
    return Problem(given, tuple(given), tuple(given), wide=wide, absolute=absolute, skip=skip)


def _table(xyz1: Tensor, xyz2: Tensor) -> Tensor:  # [B, N, M]
    return (xyz1[:, :, None] - xyz2[:, None]).square().sum(3)


def _chamfer(xyz1: Tensor, xyz2: Tensor) -> tuple[Tensor, ...]:
    apart = _table(xyz1, xyz2)
    if 0 in apart.shape[1:]:
        none = [points.sum(2) * 0 for points in (xyz1, xyz2)]
        return *none, *(one.detach() for one in none)
    (one, first), (other, second) = apart.min(2), apart.min(1)
    return one, other, first.double(), second.double()


def _with_float_indices(**given: Tensor) -> tuple[Tensor, ...]:
    one, other, *indices = chamfer_distance(**given)
    assert all(index.dtype == torch.int32 for index in indices)
    return one, other, *(index.double() for index in indices)


def _chamfer_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    bounds.update({name: 0.0 for name in bounds if name.startswith("output")})


def _points_and_polygons(N: int, M: int) -> Problem:
    return Problem({"points": rand(N, 2), "polygons": rand(M, 8)})


def _sets(N: int, K: int) -> Problem:
    return Problem({"pointsets": rand(N, 18), "polygons": rand(K, 8)})


OPERATORS = (
    *(
        Operator(
            call.__name__,
            lambda call=call, **given: call(**given).nan_to_num(IS_NAN),
            _draw_pairs(is_flat, names),
            _pairs,
            _pair_bounds,
        )
        for call, is_flat, names in (
            (diff_iou_rotated_2d, True, ("box1", "box2")),
            (diff_iou_rotated_3d, False, ("box3d1", "box3d2")),
        )
    ),
    Operator(
        "convex_iou",
        lambda **given: convex_iou(**given).nan_to_num(IS_NAN),
        lambda draw: _draw_sets(draw, False),
        _iou_table,
        _bounds,
        of_size=(lambda n: _sets(n, 3), lambda n: _sets(4, n)),
        launches=sizes.arguments(pointsets="N 18", polygons="M 8"),
    ),
    Operator(
        "convex_giou",
        _marked_giou,
        lambda draw: _draw_sets(draw, True),
        _giou_rows,
        _giou_bounds,
        of_size=(lambda n: _sets(n, n),),
        launches=sizes.arguments(pointsets="N 18", polygons="N 8"),
    ),
    Operator(
        "min_area_polygons",
        lambda **given: min_area_polygons(**given).nan_to_num(IS_NAN),
        _draw_least,
        _least_boxes,
        lambda problem, bounds: bounds.update(output=100.0),
        of_size=(lambda n: Problem({"pointsets": rand(n, 18)}),),
        launches=sizes.arguments(pointsets="N 18"),
    ),
    Operator(
        "points_in_polygons",
        points_in_polygons,
        _draw_inside,
        nothing,
        compare=_same_insides,
        of_size=(lambda n: _points_and_polygons(n, 3), lambda n: _points_and_polygons(4, n)),
        launches=sizes.arguments(points="N 2", polygons="M 8"),
    ),
    Operator(
        "chamfer_distance",
        _with_float_indices,
        _draw_chamfer,
        _chamfer,
        _chamfer_bounds,
        launches=sizes.arguments(sizes.wide_types, xyz1="B N 2", xyz2="B M 2"),
    ),
)


def test_the_gradient_where_sides_coincide_is_mmcvs():
    """A hull whose left and lower sides lie on those of the polygon; the shared area has 0 or 1 as derivative there."""
    points = torch.tensor([[1.0, 1, 2, 2, 1, 2, 2, 1, 1, 3, 3, 1, 2, 3, 3, 2, 1.5, 1.5]])
    giou, gradient = convex_giou(points, torch.tensor([[1.0, 1, 1, 2, 2, 2, 2, 1]]))
    assert giou.item() == pytest.approx(2 / 7)
    corners = [
        0.0204,
        0.0408,
        0,
        0,
        0,
        0,
        0,
        0,
        0.0612,
        -0.0408,
        -0.0408,
        0.0816,
        -0.0408,
        -0.0816,
        -0.0816,
        -0.0408,
        0,
        0,
    ]
    assert gradient[0].tolist() == pytest.approx(corners, abs=1e-4)


@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_the_overlap_and_its_gradient_in_line_with_the_origin_and_of_small_sets(size):
    """A square from the origin to (2, 2), and one from (1, 1) to (3, 3): the IoU is 1 / 7 and the hull has area 8."""
    points = size * torch.tensor([[0.0, 0, 2, 0, 2, 2, 0, 2, *[1.0, 0.5] * 5]], dtype=torch.float64)
    giou, gradient = convex_giou(points, size * torch.tensor([[1, 1, 3, 1, 3, 3, 1, 3]]).double())
    assert giou.item() == pytest.approx(1 / 7 - 1 / 8)
    # The corner (0, 0): moving it outward by x adds x to the set, to the union and to the common hull.
    expected = (1 / 49 - (8 - 7) / 64) / size
    assert gradient[0, :2].tolist() == pytest.approx([expected] * 2)


def test_two_lowest_points_that_are_hardly_apart_are_gone_round_once(device):
    """A square from the origin to (2, 2), whose lowest corner is there twice, and one from (1, 0) to (3, 2)."""
    points = torch.tensor([[1e-40, 0, -0.0, 0, 2, 0, 2, 2, 0, 2, *[1.0, 0.5] * 4]], device=device).double()
    other = torch.tensor([[1.0, 0, 3, 0, 3, 2, 1, 2]], device=device).double()
    assert convex_iou(points, other).item() == pytest.approx(1 / 3)
