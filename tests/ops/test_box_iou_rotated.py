"""Overlaps and suppression of rotated boxes, quadrilaterals and 3-D boxes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz import sizes
from tests.fuzz.boxes import FLAT, boxes_in_space, overlap, turned
from tests.fuzz.polygons import IS_NAN, rectangle
from tests.fuzz.problem import Draw, Operator, Problem, Seeded, nothing, rand, wide_of
from tests.fuzz.suppression import LABELS, greedily_kept, random_scores, same_kept, with_scores
from visdet.ops import (
    box_iou_quadri,
    box_iou_rotated,
    boxes_iou3d,
    boxes_overlap_bev,
    nms3d,
    nms3d_normal,
    nms_quadri,
    nms_rotated,
)
from visdet.ops.box_iou_rotated import MODES, box_iou_rotated_reference


def _draw_table(draw: Draw) -> Problem:
    dtype = draw.dtype()
    given = {
        name: draw.place(boxes_in_space(draw, draw.size(9)), draw.dtype(dtype, torch.float32), bad=0.3)
        for name in ("boxes_a", "boxes_b")
    }
    return Problem(given, positions=tuple(given), wide=torch.float64, epsilon=1e-9)


def _table(kind: str) -> Callable[..., Tensor]:
    def table(boxes_a: Tensor, boxes_b: Tensor) -> Tensor:
        rows = [[overlap(one, other, kind) for other in boxes_b.tolist()] for one in boxes_a.tolist()]
        return boxes_a.new_tensor(rows).view(len(boxes_a), len(boxes_b))

    return table


def _table_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    bounds["output"] = 1000.0


def _draw_suppression(is_normal: bool) -> Callable[[Draw], Problem]:
    def draw_problem(draw: Draw) -> Problem:
        N = 70 if draw.is_big else draw.size(25)
        dtype = draw.dtype()
        boxes = draw.place(boxes_in_space(draw, N), dtype, can_expand=False, bad=0.5)
        scores = draw.place(
            random_scores(draw, N), draw.dtype(dtype, torch.float64), can_expand=False, bad=0.3
        )
        flat = boxes[:, FLAT].double()
        if is_normal:
            flat[:, 4] = 0
        overlaps, threshold = _table("flat")(flat, flat), draw.random.uniform(0.05, 0.95)
        given = {"boxes": boxes, "scores": scores, "iou_threshold": threshold}
        is_near = ((overlaps - threshold).abs() < 1e-4) | overlaps.isnan()
        near = (overlaps > threshold) & (overlaps != IS_NAN)
        return Problem(given, skip={"output": bool(is_near.any())}, reference_arguments={"boxes": near})

    return draw_problem


def _same_kept(problem: Problem, got: tuple[Tensor], expected: Any) -> str:
    kept = greedily_kept(problem.arguments["scores"], problem.reference_arguments["boxes"])
    found = got[0].tolist()
    is_wrong = got[0].dtype != torch.int64 or (not problem.skip["output"] and found != kept)
    return f"kept {found}, expected {kept}" if is_wrong else ""


def _boxes(draw: Draw, N: int, columns: int) -> Tensor:
    """Return rotated boxes, or convex quadrilaterals. In some problems they are crowded, and many are equal."""
    center, sides = draw.uniform(0, draw.pick(5.0, 30.0, 100.0), N, 2), draw.uniform(0.1, 30, N, 2)
    center, sides, angle = turned(draw, center, sides)
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
            "bboxes1": draw.place(_boxes(draw, M, columns), dtype, bad=0.3),
            "bboxes2": draw.place(_boxes(draw, N, columns), dtype, bad=0.3),
            "mode": draw.pick("iou", "iof"),
            "aligned": aligned,
        }
        if columns == 5:
            arguments["clockwise"] = draw.chance(0.7)
        return Problem(
            arguments, wide=wide_of(dtype), error_factor=4000.0, skip={"output": draw.has_bad_numbers}
        )

    return draw_problem


def _overlaps(bboxes1: Tensor, bboxes2: Tensor, mode: str, aligned: bool, clockwise: bool = True) -> Tensor:
    if not clockwise:
        bboxes1, bboxes2 = (torch.cat([boxes[:, :4], -boxes[:, 4:]], 1) for boxes in (bboxes1, bboxes2))
    return box_iou_rotated_reference(bboxes1, bboxes2, MODES.index(mode), aligned)


def _bounds(problem: Problem, bounds: dict[str, float]) -> None:
    bounds["output"] = 1.0


def _draw_suppression_of_rotated_boxes(columns: int) -> Callable[[Draw], Problem]:
    def draw_problem(draw: Draw) -> Problem:
        N = draw.pick(65, 300) if draw.is_big else draw.size(40)
        dtype = draw.dtype(torch.float32, torch.float64)
        boxes, scores = _boxes(draw, N, columns).to(dtype).double(), random_scores(draw, N).to(dtype).double()
        overlaps = box_iou_rotated_reference(boxes, boxes, 0, False)
        threshold = draw.random.uniform(0.05, 0.95)
        arguments: dict[str, Any] = {
            "dets": draw.place(boxes, dtype, can_expand=False, bad=0.3),
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
    keep = torch.tensor(greedily_kept(scores, near), dtype=torch.int64, device=dets.device)
    return with_scores(dets, scores, keep)


def _same(problem: Problem, got: tuple[Tensor, Tensor], expected: dict[str, Any]) -> str:
    boxes = {"boxes": problem.arguments["dets"]}
    return same_kept(Problem(boxes, skip=problem.skip), got, expected)


def _of_sizes(first: str, second: str, columns: int) -> Callable[[int], Problem]:
    return lambda n: Problem({first: rand(n, columns), second: rand(3, columns)})


OPERATORS = (
    *(
        Operator(
            call.__name__,
            lambda call=call, **given: call(**given).nan_to_num(IS_NAN),
            _draw_table,
            _table(kind),
            _table_bounds,
            of_size=(_of_sizes("boxes_a", "boxes_b", 7),),
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
        )
        for call in (nms3d, nms3d_normal)
    ),
    *(
        Operator(
            call.__name__,
            call,
            _draw_overlaps(columns),
            _overlaps,
            _bounds,
            of_size=(_of_sizes("bboxes1", "bboxes2", columns),),
            launches=launches,
        )
        for call, columns, launches in (
            (
                box_iou_rotated,
                5,
                sizes.arguments(
                    bboxes1="N 5", bboxes2=st.sampled_from(["N 5", "M 5"]), mode="iof", aligned=st.booleans()
                ),
            ),
            (box_iou_quadri, 8, None),
        )
    ),
    *(
        Operator(
            call.__name__,
            call,
            _draw_suppression_of_rotated_boxes(columns),
            _kept,
            compare=_same,
            spoiled={"labels": ("rank", 0)},
            launches=sizes.arguments(
                dets=f"N {columns}", scores="N", iou_threshold=0.5, labels=LABELS, **turns
            ),
        )
        for call, columns, turns in (
            (nms_rotated, 5, {"clockwise": st.booleans()}),
            (nms_quadri, 8, {}),
        )
    ),
)


PI = math.pi


def rotated_boxes(N, seed=0, side=6.0):
    scale = torch.tensor([side, side, 4, 2, 2 * PI], dtype=torch.float64)
    return Seeded(seed).uniform(N, 5) * scale


def corners_of(boxes):
    """Return the corners [N, 8]."""
    corners = torch.tensor([rectangle(*box) for box in boxes.tolist()], dtype=torch.complex128)
    return torch.view_as_real(corners).reshape(-1, 8)


OCTAGON = 2 * (math.sqrt(2) - 1)  # what a unit square shares with itself turned by 45 degrees
PAIRS = {
    "the same": ([3, 4, 2, 1, 0.3], [3, 4, 2, 1, 0.3], 2.0),
    "half a turn": ([3, 4, 2, 1, 0.3], [3, 4, 2, 1, 0.3 + PI], 2.0),
    "a quarter, sides exchanged": ([3, 4, 2, 1, 0.3], [3, 4, 1, 2, 0.3 - PI / 2], 2.0),
    "moved along": ([0, 0, 2, 1, 0.5], [math.cos(0.5), math.sin(0.5), 2, 1, 0.5], 1.0),
    "a cross": ([0, 0, 4, 1, 0.2], [0, 0, 4, 1, 0.2 + PI / 2], 1.0),
    "an octagon": ([0, 0, 1, 1, 0], [0, 0, 1, 1, PI / 4], OCTAGON),
    "within": ([0, 0, 9, 9, 0.1], [1, 1, 1, 2, 1.4], 2.0),
    "a common edge": ([0, 0, 2, 2, 0], [2, 0, 2, 2, 0], 0.0),
    "a common corner": ([0, 0, 2, 2, 0], [2, 2, 2, 2, PI], 0.0),
    "apart": ([0, 0, 1, 1, 0.4], [5, 5, 1, 1, 0.4], 0.0),
    "no width": ([0, 0, 0, 2, 0], [0, 0, 2, 2, 0], 0.0),
    "a point twice": ([1, 1, 0, 0, 0], [1, 1, 0, 0, 0], 0.0),
    "a negative side": ([0, 0, -2, 2, 0], [0, 0, 2, 2, 0], 0.0),
    "tiny": ([1, 1, 1e-8, 1e-8, 0.2], [1, 1, 1e-8, 1e-8, 0.2], 1e-16),
    "thin": ([500, 400, 1000, 0.01, 0.7], [500, 400, 1000, 0.01, 0.7], 10.0),
    "far": ([1e6, -1e6, 4, 2, 0.7], [1e6, -1e6, 4, 2, 0.7 + PI], 8.0),
}


@pytest.mark.parametrize("name", PAIRS)
def test_areas_by_hand(name, backend):
    first, second, shared = PAIRS[name]
    boxes = torch.tensor([first, second], dtype=torch.float64)
    areas = boxes[:, 2].clamp(min=0) * boxes[:, 3].clamp(min=0)
    for one, other in ((0, 1), (1, 0)):
        pair = boxes[[one]], boxes[[other]]
        union = areas.sum() - shared
        expected = {
            "area": shared,
            "iou": shared / union if shared else 0,
            "iof": shared / areas[one] if shared else 0,
        }
        for mode, value in expected.items():
            found = {
                "rotated": box_iou_rotated(*pair, mode).item(),
                "quadri": box_iou_quadri(corners_of(pair[0]), corners_of(pair[1]), mode, True).item(),
            }
            assert found == pytest.approx(
                dict.fromkeys(found, float(value)), rel=1e-6, abs=1e-22 if name == "tiny" else 1e-9
            )


def test_shapely_agrees(backend):
    polygon = pytest.importorskip("shapely.geometry").Polygon
    boxes = rotated_boxes(40)
    drawn = Seeded(1).uniform(60, 8) * 5
    quadri = torch.stack([one for one in drawn if polygon(one.view(4, 2).tolist()).is_valid])
    for found, given in ((box_iou_rotated, boxes), (box_iou_quadri, quadri)):
        corners = corners_of(given) if given.shape[1] == 5 else given
        polygons = [polygon(one.view(4, 2).tolist()) for one in corners]
        shared = torch.tensor(
            [[p.intersection(q).area for q in polygons] for p in polygons], dtype=torch.float64
        )
        areas = torch.tensor([p.area for p in polygons], dtype=torch.float64)
        assert_close(found(given, given, "area"), shared, rtol=0, atol=1e-12)
        iou = shared / (areas[:, None] + areas - shared)
        assert_close(found(given, given), iou, rtol=0, atol=1e-12)
        assert_close(found(given, given, "iof"), shared / areas[:, None], rtol=0, atol=1e-12)
        assert_close(found(given, given.flip(0), aligned=True), iou.flip(1).diagonal(), rtol=0, atol=1e-12)


def test_what_is_no_number_overlaps_nothing(backend):
    boxes = torch.tensor([[0.0, 0, 2, 2, 0]]).repeat(7, 1)
    for i, value in enumerate((math.nan, -math.inf, math.inf, math.nan, math.inf)):
        boxes[i + 1, i] = value
    overlaps = box_iou_rotated(boxes, boxes)
    is_sound = torch.tensor([True, False, False, False, False, False, True])
    assert (overlaps[is_sound][:, is_sound] == 1).all() and overlaps[~is_sound].isnan().all()
    keep = nms_rotated(boxes, torch.arange(7, 0, -1).float(), 0.5)[1]
    assert keep.tolist() == [0, 1, 2, 3, 4, 5]
    corners = torch.tensor([[0.0, 0, 2, 0, 2, 2, 0, 2]]).repeat(3, 1)
    corners[1, 5] = math.nan
    assert nms_quadri(corners, torch.ones(3), 0.5)[1].tolist() == [0, 1]


def test_angles_turn_either_way(backend):
    boxes, other = torch.tensor([[0.0, 0, 4, 1, 0.5]]), torch.tensor([[1.0, 1, 4, 1, 0.5]])
    mirror = torch.tensor([1, 1, 1, 1, -1])
    mirrored, upright = box_iou_rotated(boxes * mirror, other * mirror), box_iou_rotated(boxes, other)
    assert torch.equal(box_iou_rotated(boxes, other, clockwise=False), mirrored)
    assert abs(mirrored - upright) > 0.1
    both, scores = torch.cat([boxes, other]), torch.tensor([0.9, 0.8])
    threshold = (mirrored + upright).item() / 2
    lengths = [
        len(nms_rotated(both, scores, threshold, clockwise=clockwise)[1]) for clockwise in (True, False)
    ]
    assert sorted(lengths) == [1, 2]


def test_an_overlap_equal_to_the_threshold_is_not_more(backend):
    boxes = torch.tensor([[1.0, 1, 2, 2, 0], [2, 1, 2, 2, 0]])  # 1/3
    assert len(nms_rotated(boxes, torch.ones(2), 1 / 3)[1]) == 2
    assert len(nms_rotated(boxes, torch.ones(2), 0.333)[1]) == 1


R8 = torch.zeros(3, 8)


REFUSED = [
    (
        lambda: box_iou_quadri(R8, R8[:2], aligned=True),
        r"bboxes2 must be \[3, 8\] as bboxes1 .* got \[2, 8\]",
    ),
]
