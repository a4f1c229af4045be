"""Problems of box_iou_rotated, box_iou_quadri, nms_rotated and nms_quadri."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import Draw, Operator, Problem
from visdet.ops import box_iou_quadri, box_iou_rotated, nms_quadri, nms_rotated
from visdet.ops.box_iou_rotated import MODES, box_iou_rotated_reference

from .boxes import launches_of_nms, random_scores, same_kept

__all__ = ["OPERATORS"]


def _boxes(draw: Draw, N: int, columns: int) -> Tensor:
    """Return rotated boxes, or convex quadrilaterals. In some problems they are crowded, and many are equal."""
    center, sides = draw.uniform(0, draw.pick(5.0, 30.0, 100.0), N, 2), draw.uniform(0.1, 30, N, 2)
    angle = draw.uniform(-7, 7, N, 1)
    if draw.chance(0.3):
        center, sides, angle = center.round(), sides.ceil(), (angle * 2).round() * math.pi / 4
    if columns == 5:
        return torch.cat([center, sides, angle], 1)
    turns = angle + torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=torch.float64) * math.pi
    around = torch.stack([turns.cos(), turns.sin()], 2) * sides[:, :1, None]
    around[:, ::2] *= draw.uniform(0.2, 2, 1).item()
    return (center[:, None] + around).flatten(1)


def _draw_overlaps(columns: int) -> Callable[[Draw], Problem]:
    def draw_problem(draw: Draw) -> Problem:
        M = draw.size(300) if draw.chance(0.1) else draw.size(20)
        aligned, dtype = draw.chance(0.3), draw.dtype()
        N = M if aligned else draw.size(150)
        arguments = {
            "bboxes1": draw.place(draw.with_bad_numbers(_boxes(draw, M, columns), 0.3), dtype),
            "bboxes2": draw.place(draw.with_bad_numbers(_boxes(draw, N, columns), 0.3), dtype),
            "mode": draw.pick("iou", "iof"),
            "aligned": aligned,
        }
        if columns == 5:
            arguments["clockwise"] = draw.chance(0.7)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Problem(arguments, wide=wide, error_factor=4000.0, skip={"output": draw.has_bad_numbers})

    return draw_problem


def _overlaps(bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, clockwise: bool = True) -> Tensor:
    if not clockwise:
        bboxes1, bboxes2 = (torch.cat([boxes[:, :4], -boxes[:, 4:]], 1) for boxes in (bboxes1, bboxes2))
    return box_iou_rotated_reference(bboxes1, bboxes2, MODES.index(mode), aligned)


def _bounds(problem: Problem, bounds: dict[str, float]) -> None:
    bounds["output"] = 1.0


def _draw_suppression(columns: int) -> Callable[[Draw], Problem]:
    def draw_problem(draw: Draw) -> Problem:
        N = draw.pick(65, 300) if draw.is_big else draw.size(40)
        dtype = draw.dtype(torch.float32, torch.float64)
        boxes, scores = _boxes(draw, N, columns).to(dtype).double(), random_scores(draw, N).to(dtype).double()
        overlaps = box_iou_rotated_reference(boxes, boxes, 0, False)
        threshold = draw.random.uniform(0.05, 0.95)
        arguments: dict[str, Any] = {
            "dets": draw.place(draw.with_bad_numbers(boxes, 0.3), dtype, can_expand=False),
            "scores": draw.place(scores, dtype, can_expand=False),
            "iou_threshold": threshold,
        }
        if draw.chance(0.5):
            arguments["labels"] = draw.place(draw.whole(0, draw.pick(1, 3, 80), N), can_expand=False)
        is_near = bool(((overlaps - threshold).abs() < 1e-5).any())
        return Problem(
            arguments,
            positions=("dets", "scores"),
            wide=dtype,
            skip={"output": is_near or draw.has_bad_numbers},
        )

    return draw_problem


def _kept(
    dets: Tensor, scores: Tensor, iou_threshold: float, labels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    near = box_iou_rotated_reference(dets, dets, 0, False) > iou_threshold
    if labels is not None:
        near &= labels[:, None] == labels
    kept: list[int] = []
    for i in scores.sort(descending=True, stable=True).indices.tolist():
        if not bool(near[kept, i].any()):
            kept.append(i)
    keep = torch.tensor(kept, dtype=torch.int64, device=dets.device)
    return torch.cat([dets[keep], scores[keep, None]], 1), keep


def _same(problem: Problem, got: tuple[Tensor, Tensor], expected: dict[str, Any]) -> str:
    boxes = {"boxes": problem.arguments["dets"]}
    return same_kept(Problem(boxes, skip=problem.skip), got, expected)


@st.composite
def _launches_of_nms_quadri(draw: st.DrawFn) -> dict[str, Any]:
    drawn = draw(launches_of_nms())
    N, dtype = len(drawn["scores"]), drawn["scores"].dtype
    dets = sizes.empty(N, 8, dtype=dtype)
    return {"dets": dets, "scores": drawn["scores"], "iou_threshold": 0.5, "labels": drawn["classes"]}


@st.composite
def _launches_of_nms_rotated(draw: st.DrawFn) -> dict[str, Any]:
    drawn = draw(_launches_of_nms_quadri())
    return drawn | {"dets": drawn["dets"][:, :5], "clockwise": draw(st.booleans())}


@st.composite
def _launches_of_box_iou_rotated(draw: st.DrawFn) -> dict[str, Any]:
    M, N, dtype = (
        draw(st.one_of(sizes.count, st.sampled_from([1_000_000]))),
        draw(sizes.count),
        draw(sizes.value_types),
    )
    aligned = draw(st.booleans())
    return {
        "bboxes1": sizes.empty(M, 5, dtype=dtype),
        "bboxes2": sizes.empty(M if aligned else N, 5, dtype=dtype),
        "mode": draw(st.sampled_from(["iou", "iof"])),
        "aligned": aligned,
    }


OPERATORS = (
    *(
        Operator(
            call.__name__,
            call,
            _draw_overlaps(columns),
            _overlaps,
            _bounds,
            spoiled={"bboxes1": ("rank", 1), "bboxes2": ("rank", 1)},
        )
        for call, columns in ((box_iou_rotated, 5), (box_iou_quadri, 8))
    ),
    *(
        Operator(
            call.__name__,
            call,
            _draw_suppression(columns),
            _kept,
            compare=_same,
            spoiled={"dets": ("rank", 0, 1), "scores": ("rank", 0)},
        )
        for call, columns in ((nms_rotated, 5), (nms_quadri, 8))
    ),
)
