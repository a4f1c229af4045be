"""Problems of diff_iou_rotated_2d and _3d, boxes_overlap_bev, boxes_iou3d, nms3d and nms3d_normal."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.polygons import IS_NAN, area, by_differences, rectangle, shared
from tests.fuzz.problem import EXTREME, Draw, Operator, Problem
from visdet.ops import (
    boxes_iou3d,
    boxes_overlap_bev,
    diff_iou_rotated_2d,
    diff_iou_rotated_3d,
    nms3d,
    nms3d_normal,
)

from .boxes import random_scores
from .point_neighbours import nothing

__all__ = ["OPERATORS"]

FLAT = (0, 1, 3, 4, 6)


def _boxes(draw: Draw, *shape: int, is_flat: bool = False) -> Tensor:
    """Return boxes (x, y, z, dx, dy, dz, heading). In some problems many are equal, or some sides are not positive."""
    center, sides = draw.uniform(0, draw.pick(5.0, 20.0, 60.0), *shape, 3), draw.uniform(0.1, 15, *shape, 3)
    angle = draw.uniform(-7, 7, *shape, 1)
    if draw.chance(0.3):
        center, sides, angle = center.round(), sides.ceil(), (angle * 2).round() * math.pi / 4
    if draw.chance(0.2):
        sides = torch.where(draw.uniform(0, 1, *shape, 3) < 0.2, -draw.whole(0, 3, *shape, 3), sides)
    boxes = torch.cat([center, sides, angle], -1)
    return boxes[..., FLAT] if is_flat else boxes


def _parts(box: list[float]) -> tuple[list[float], list[float]]:
    """Return a box seen from above, and its height z and side dz, which are 0 and 1 for (x, y, w, h, angle)."""
    return (box, [0.0, 1.0]) if len(box) == 5 else ([box[i] for i in FLAT], [box[2], box[5]])


def _shared(one: list[float], other: list[float], kind: str) -> float:
    """Return the IoU of two boxes, or the area that they share seen from above. NaN stands for what is not compared."""
    (flat, (z, dz)), (flat2, (z2, dz2)) = _parts(one), _parts(other)
    given = flat + flat2 if kind == "area" else one + other
    if kind == "area" and -math.inf in flat[2:4] + flat2[2:4]:
        return math.nan  # A negative side may count as 0 or as infinite.
    if not all(map(math.isfinite, given)):
        return IS_NAN
    if max(map(abs, given)) > EXTREME:
        return math.nan
    p, q = rectangle(*flat), rectangle(*flat2)
    common, areas = shared(p, q), (area(p), area(q))
    if kind == "area":
        return common
    common *= max(min(z + dz / 2, z2 + dz2 / 2) - max(z - dz / 2, z2 - dz2 / 2), 0.0)
    union = areas[0] * max(dz, 0.0) + areas[1] * max(dz2, 0.0) - common
    return common / union if union > 0 else IS_NAN if kind == "pair" else 0.0


def _draw_pairs(is_flat: bool, names: tuple[str, str]) -> Callable[[Draw], Problem]:
    def draw_problem(draw: Draw) -> Problem:
        shape, dtype = (draw.size(3), draw.size(6)), draw.dtype()
        boxes = [_boxes(draw, *shape, is_flat=is_flat) for _ in names]
        if draw.chance(0.2):
            boxes[1][:, ::2] = boxes[0][:, ::2]
        given = {
            name: draw.place(draw.with_bad_numbers(one, 0.3), dtype)
            for name, one in zip(names, boxes, strict=True)
        }
        return Problem(given, names, names, wide=torch.float64, epsilon=1e-9)

    return draw_problem


def _pairs(**given: Tensor) -> Tensor:
    return by_differences(lambda one, other: _shared(one, other, "pair"), *given.values())


def _pair_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    bounds["output"] = 1.0
    for name in problem.differentiable:
        bounds[name] = 1e4 * bounds.get("grad_total", 0.0)


def _draw_table(draw: Draw) -> Problem:
    dtype = draw.dtype()
    given = {
        name: draw.place(
            draw.with_bad_numbers(_boxes(draw, draw.size(9)), 0.3), draw.dtype(dtype, torch.float32)
        )
        for name in ("boxes_a", "boxes_b")
    }
    return Problem(given, positions=tuple(given), wide=torch.float64, epsilon=1e-9)


def _table(kind: str) -> Callable[..., Tensor]:
    def table(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
        rows = [[_shared(one, other, kind) for other in boxes_b.tolist()] for one in boxes_a.tolist()]
        return boxes_a.new_tensor(rows).view(len(boxes_a), len(boxes_b))

    return table


def _table_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    bounds["output"] = 1000.0


def _draw_suppression(is_normal: bool) -> Callable[[Draw], Problem]:
    def draw_problem(draw: Draw) -> Problem:
        N = 70 if draw.is_big else draw.size(25)
        dtype = draw.dtype()
        boxes = draw.place(draw.with_bad_numbers(_boxes(draw, N), 0.5), dtype, can_expand=False)
        scores = draw.place(
            draw.with_bad_numbers(random_scores(draw, N), 0.3),
            draw.dtype(dtype, torch.float64),
            can_expand=False,
        )
        flat = boxes[:, FLAT].double()
        if is_normal:
            flat[:, 4] = 0
        overlaps = _table("flat")(flat, flat)
        given = {"boxes": boxes, "scores": scores, "iou_threshold": draw.random.uniform(0.05, 0.95)}
        is_near = ((overlaps - given["iou_threshold"]).abs() < 1e-4) | overlaps.isnan()
        near = (overlaps > given["iou_threshold"]) & (overlaps != IS_NAN)
        return Problem(given, skip={"output": bool(is_near.any())}, reference_arguments={"boxes": near})

    return draw_problem


def _same_kept(problem: Problem, got: tuple[Tensor], expected: Any) -> str:
    near, kept = problem.reference_arguments["boxes"].tolist(), []
    for i in problem.arguments["scores"].sort(descending=True, stable=True).indices.tolist():
        if not any(near[k][i] for k in kept):
            kept.append(i)
    is_wrong = got[0].dtype != torch.int64 or (not problem.skip["output"] and got[0].tolist() != kept)
    return f"kept {got[0].tolist()}, expected {kept}" if is_wrong else ""


OPERATORS = (
    *(
        Operator(
            call.__name__,
            lambda call=call, **given: call(**given).nan_to_num(IS_NAN),
            _draw_pairs(is_flat, names),
            _pairs,
            _pair_bounds,
            spoiled={names[0]: ("rank", "type", 0, 1, 2), names[1]: ("rank", "type", "device", 0, 1, 2)},
        )
        for call, is_flat, names in (
            (diff_iou_rotated_2d, True, ("box1", "box2")),
            (diff_iou_rotated_3d, False, ("box3d1", "box3d2")),
        )
    ),
    *(
        Operator(
            call.__name__,
            lambda call=call, **given: call(**given).nan_to_num(IS_NAN),
            _draw_table,
            _table(kind),
            _table_bounds,
            spoiled={"boxes_a": ("rank", 1), "boxes_b": ("rank", 1)},
        )
        for call, kind in ((boxes_overlap_bev, "area"), (boxes_iou3d, "iou"))
    ),
    *(
        Operator(
            call.__name__,
            call,
            _draw_suppression(call is nms3d_normal),
            nothing,
            compare=_same_kept,
            spoiled={"boxes": ("rank", 0, 1), "scores": ("rank", 0)},
        )
        for call in (nms3d, nms3d_normal)
    ),
)
