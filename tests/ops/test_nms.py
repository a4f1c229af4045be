"""nms, batched_nms, soft_nms, nms_match and bbox_overlaps."""

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from calls import refusals
from emulation import called
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch.testing import assert_close

from tests.fuzz import sizes
from tests.fuzz.problem import FLOATING, WIDE_TYPES, Draw, Operator, Problem, Seeded, generator_of, wide_of
from tests.fuzz.suppression import LABELS, greedily_kept, random_scores, same_kept, with_scores
from visdet.ops import (
    batched_nms,
    bbox_overlaps,
    nms,
    nms3d,
    nms3d_normal,
    nms_match,
    nms_quadri,
    nms_rotated,
    register_nms,
    soft_nms,
)
from visdet.ops.nms import kept_indices
from visdet.ops.soft_nms import SOFT_METHODS, soft_nms_reference

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.9, 1 / 3, 1.0, -0.5, math.nan)


BAD_NUMBERS = (math.nan, math.inf, -math.inf, 1e30, -1e30, 1e-40, -0.0)


def of_random_problem(seed, N, columns=4, dtype=None):
    """Return boxes, scores, classes, candidates and a threshold, with ties, overlaps at thresholds and bad numbers."""
    number = seed * 1009 + N
    draw, numbers = random.Random(number), Seeded(number)
    dtype, rand = dtype or draw.choice(WIDE_TYPES), numbers.uniform
    corner, sides = rand(N, 2) * draw.choice([4, 20, 100]), rand(N, 2) * draw.choice([3, 20]) - 0.1
    if draw.random() < 0.5:
        corner, sides = corner.round(), sides.round()
    boxes = torch.cat([corner, corner + sides], 1)
    if columns == 5:
        boxes = torch.cat([corner, sides, (rand(N, 1) * 8).round() * draw.choice([math.pi / 4, 0.1])], 1)
    elif columns == 8:
        x1, y1, x2, y2 = boxes.unbind(1)
        boxes = torch.stack([x1, y1, x2, y1, x2, y2, x1, y2], 1) + rand(N, 8).round() * draw.choice([0, 1])
    scores = rand(N) if draw.random() < 0.5 else (rand(N) * 4).round()
    if draw.random() < 0.3:
        for _ in range(3):
            boxes[draw.randrange(N), draw.randrange(columns)] = draw.choice(BAD_NUMBERS)
            scores[draw.randrange(N)] = draw.choice(BAD_NUMBERS)
    count = draw.choice([0, 1, 4, 30])
    classes = torch.randint(-count, count + 1, (N,), generator=numbers.generator) * 10**12 if count else None
    is_candidate = rand(N) < 0.8 if draw.random() < 0.3 else None
    threshold = draw.choice([*THRESHOLDS, draw.random()])
    return boxes.to(dtype), scores.to(dtype), classes, is_candidate, threshold


def _rows(draw: Draw, count: int, whole: bool) -> Tensor:
    """Return boxes [count, 4] (x1, y1, x2, y2) with sides of at least a half. In some problems they are crowded."""
    corner = draw.uniform(0, draw.pick(5.0, 30.0, 100.0), count, 2)
    boxes = torch.cat([corner, corner + draw.uniform(0.5, 30, count, 2)], 1)
    return boxes.round() if whole else boxes


def _draw_overlaps(draw: Draw) -> Problem:
    # With ties, boxes without area and bad numbers, it is not defined which coordinate gets a gradient.
    whole = draw.chance(0.4)
    unsure = whole or draw.has_bad_numbers
    aligned = draw.chance(0.3)
    M = draw.size(300) if draw.chance(0.1) else draw.size(20)
    N = M if aligned else draw.size(20)
    dtype = draw.dtype()
    offset = draw.pick(0, 0, 1)
    arguments = {
        "bboxes1": draw.place(_rows(draw, M, whole), dtype, bad=0.5),
        "bboxes2": draw.place(_rows(draw, N, whole), draw.dtype(dtype, dtype, torch.float32), bad=0.5),
        "mode": draw.pick("iou", "iof"),
        "aligned": aligned,
        "offset": offset,
    }
    exact = all(arguments[name].dtype in WIDE_TYPES for name in ("bboxes1", "bboxes2"))
    return Problem(
        arguments,
        differentiable=("bboxes1", "bboxes2"),
        wide=wide_of(dtype),
        error_factor=4000.0,
        skip={"bboxes1": unsure or not exact, "bboxes2": unsure or not exact},
    )


def _overlap_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    bounds["output"] = 1.0
    for name in ("bboxes1", "bboxes2"):
        if name in bounds:
            bounds[name] = 32 * bounds.get("grad_total", 0.0)


def _overlap_matrix(boxes: Tensor, offset: int) -> Tensor:
    return bbox_overlaps(boxes, boxes, offset=offset).nan_to_num(0.0)


def _clear_threshold(draw: Draw, boxes: Tensor, offset: int) -> float:
    """Return a threshold that is not near to any overlap."""
    overlaps = _overlap_matrix(boxes.double(), offset).flatten()
    while True:
        threshold = draw.random.uniform(0.05, 0.95)
        if not bool(((overlaps - threshold).abs() < 1e-5).any()):
            return threshold


def _nms_problem(draw: Draw, is_soft: bool = False) -> Problem:
    count = draw.pick(300, 1025, 2000) if draw.is_big and draw.device == "cuda" else draw.size(40)
    boxes, offset = _rows(draw, count, draw.chance(0.4)), draw.pick(0, 0, 1)
    dtype = draw.dtype(torch.float32, torch.float64)
    boxes = boxes.to(dtype)
    scores = random_scores(draw, count)
    if is_soft:  # Rounding decides the order of equal scores.
        scores = draw.uniform(0, 1, count)
    scores = scores.to(dtype).double()
    threshold = _clear_threshold(draw, boxes, offset) if count < 3000 else 0.5001234
    bad_boxes, bad_scores = draw.with_bad_numbers(boxes, 0.3), draw.with_bad_numbers(scores, 0.3)
    is_bad = not (torch.equal(bad_boxes, boxes) and torch.equal(bad_scores, scores))
    arguments = {
        "boxes": draw.place(bad_boxes, dtype, can_expand=False),
        "scores": draw.place(bad_scores, dtype, can_expand=False),
        "iou_threshold": threshold,
        "offset": offset,
    }
    return Problem(arguments, positions=("boxes", "scores"), wide=dtype, skip={"output": is_bad})


def _draw_nms(draw: Draw) -> Problem:
    problem = _nms_problem(draw)
    problem.arguments["score_threshold"] = draw.pick(0, 0, 0.3001)
    problem.arguments["max_num"] = draw.pick(-1, -1, 0, 3)
    return problem


def _nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    offset: int,
    score_threshold: float = 0,
    max_num: int = -1,
) -> tuple[Tensor, Tensor]:
    """Return the results of greedy suppression, computed by its definition."""
    kept = greedily_kept(scores, _overlap_matrix(boxes, offset) > iou_threshold)
    keep = torch.tensor(kept, dtype=torch.int64, device=boxes.device)
    keep = keep[scores[keep] > score_threshold] if score_threshold > 0 else keep
    return with_scores(boxes, scores, keep[:max_num] if max_num > 0 else keep)


def _draw_batched(draw: Draw) -> Problem:
    problem = _nms_problem(draw)
    given = problem.arguments
    settings = {"type": "nms", "iou_threshold": given.pop("iou_threshold"), "split_thr": draw.pick(10000, 5)}
    given.pop("offset")
    given["idxs"] = draw.place(draw.whole(0, draw.pick(1, 3, 80), len(given["boxes"])), can_expand=False)
    given["nms_cfg"] = settings
    if draw.chance(0.2):
        settings["max_num"] = 4
    if draw.chance(0.1):
        settings.update(type="soft_nms")
        problem.skip["output"] = True
    return problem


def best_first(kept: list[Tensor], scores: Tensor) -> Tensor:
    """Return indices of boxes by falling scores, and those of equal scores in their order."""
    keep = torch.cat(kept).sort().values
    return keep[scores[keep].sort(descending=True, stable=True).indices]


def _batched(boxes: Tensor, scores: Tensor, idxs: Tensor, nms_cfg: dict) -> tuple[Tensor, Tensor]:
    if nms_cfg["type"] != "nms":
        return boxes[:0], idxs[:0]
    kept = [idxs[:0]]
    for label in idxs.unique().tolist():
        members = (idxs == label).nonzero().squeeze(1)
        kept.append(members[_nms(boxes[members], scores[members], nms_cfg["iou_threshold"], 0)[1]])
    return with_scores(boxes, scores, best_first(kept, scores)[: nms_cfg.get("max_num")])


def _draw_soft(draw: Draw) -> Problem:
    problem = _nms_problem(draw, is_soft=True)
    problem.arguments.update(
        sigma=draw.pick(0.5, 0.1, 2.0),
        min_score=draw.pick(1e-3, 0.2),
        method=draw.pick(*SOFT_METHODS),
    )
    return problem


def _soft(boxes: Tensor, scores: Tensor, method: str, **settings: Any) -> tuple[Tensor, ...]:
    if not bool(boxes.isfinite().all() & scores.isfinite().all()):
        return boxes[:0], boxes[:0]
    found = soft_nms_reference(boxes.cpu(), scores.cpu(), method=SOFT_METHODS.index(method), **settings)
    return tuple(t.to(boxes.device) for t in found)


def _same_soft(problem: Problem, got: tuple[Tensor, Tensor], expected: dict[str, Any]) -> str:
    """Compare detections by index, because rounding may change their order, or move a score across min_score."""
    count, low = len(problem.arguments["boxes"]), problem.arguments["min_score"]
    keep = got[1].tolist()
    if len(set(keep)) != len(keep) or any(not 0 <= i < count for i in keep):
        return f"kept indices {keep} of {count} boxes"
    if problem.skip["output"]:
        return ""
    found = dict(zip(keep, got[0][:, 4].tolist(), strict=True))
    wanted = dict(zip(expected["output 1"].tolist(), expected["output"][:, 4].tolist(), strict=True))
    for i in found.keys() | wanted.keys():
        one, other = found.get(i, low), wanted.get(i, low)
        if abs(one - other) > 1e-4 * (1 + abs(other)):
            return f"box {i} has the score {found.get(i)}, expected {wanted.get(i)}"
    return ""


OPERATORS = (
    Operator(
        "bbox_overlaps",
        bbox_overlaps,
        _draw_overlaps,
        bbox_overlaps,
        _overlap_bounds,
        spoiled={"bboxes1": ("rank", 1), "bboxes2": ("rank", 1)},
    ),
    Operator(
        "nms",
        nms,
        _draw_nms,
        _nms,
        compare=same_kept,
        launches=sizes.arguments(
            boxes="N 4",
            scores="N",
            iou_threshold=0.5,
            score_threshold=st.sampled_from([0, 0.3]),
            classes=LABELS,
        ),
    ),
    Operator(
        "batched_nms",
        batched_nms,
        _draw_batched,
        _batched,
        compare=same_kept,
        spoiled={"boxes": ("rank",), "scores": ("rank", 0), "idxs": ("rank", 0)},
        aliases=("nms",),
    ),
    Operator(
        "soft_nms",
        soft_nms,
        _draw_soft,
        _soft,
        compare=_same_soft,
    ),
)


# Overlaps of the first with the others: 1/3 (50 of 150), 9/10 (90 of 100), 0.
BOXES = torch.tensor([[0.0, 0, 10, 10], [5, 0, 15, 10], [0, 0, 10, 9], [20, 20, 30, 30]])


SCORES = torch.tensor([0.9, 0.8, 0.7, 0.6])


def random_boxes(count, seed=0, dtype=torch.float32):
    generator = generator_of(seed)
    corner = torch.rand(count, 2, generator=generator) * 80
    boxes = torch.cat([corner, corner + torch.rand(count, 2, generator=generator) * 40 + 1], 1)
    return boxes.to(dtype), torch.rand(count, generator=generator).to(dtype)


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[::-1].copy()[::-1],
        lambda array: array.astype(array.dtype.newbyteorder(">")),
        lambda array: np.asfortranarray(np.repeat(array, 2, axis=0))[::2],
        read_only,
    ],
    ids=["negative strides", "other byte order", "steps", "read-only"],
)
def test_arrays_of_any_layout(view):
    boxes, scores, classes = BOXES.numpy(), SCORES.numpy(), np.array([0, 1, 0, 0])
    for function in (nms, soft_nms):
        expected = function(boxes, scores, 0.5, classes=classes)
        found = function(view(boxes), view(scores), 0.5, classes=view(classes))
        assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
        assert all(isinstance(one, np.ndarray) for one in found) and found[1].dtype == np.int64
    table = np.concatenate([boxes, scores[:, None]], 1)
    assert [group.tolist() for group in nms_match(view(table), 0.5)] == [[0, 2], [1], [3]]


@pytest.mark.parametrize("suppress", [nms, soft_nms, batched_nms])
def test_integer_boxes_keep_their_scores(suppress):
    boxes, scores = torch.tensor([[0, 0, 4, 4], [0, 0, 4, 3], [9, 9, 12, 12]]), torch.tensor([0.5, 0.9, 0.7])
    rest = (torch.zeros(3).long(), dict(iou_threshold=0.5)) if suppress is batched_nms else (0.5,)
    dets, keep = suppress(boxes, scores, *rest)
    expected, expected_keep = suppress(boxes.float(), scores, *rest)
    assert torch.equal(dets, expected) and torch.equal(keep, expected_keep)


def test_the_selection_is_differentiable():
    boxes, scores = BOXES.clone().requires_grad_(), SCORES.clone().requires_grad_()
    nms(boxes, scores, 0.5)[0].sum().backward()
    assert scores.grad.tolist() == [1, 1, 0, 1]
    assert boxes.grad[2].tolist() == [0, 0, 0, 0]


def test_old_argument_name():
    with pytest.warns(DeprecationWarning, match="iou_thr"):
        assert nms(BOXES, SCORES, iou_thr=0.5)[1].tolist() == [0, 1, 3]


@pytest.mark.parametrize("method", SOFT_METHODS)
def test_soft_nms_of_what_is_no_box(method):
    boxes, scores = random_boxes(20, 0, torch.float64)
    boxes[3], boxes[5, 2], boxes[7] = boxes[3, 0], float("nan"), float("inf")  # no area, no number, no end
    scores[2], scores[9], scores[11] = float("nan"), float("inf"), -float("inf")
    settings = (0.3, 0.5, 1e-3, SOFT_METHODS.index(method), 0)
    found, expected = (
        torch.ops.visdet.soft_nms(boxes, scores, None, *settings),
        soft_nms_reference(boxes, scores, *settings),
    )
    assert torch.equal(found[1], expected[1]) and found[1][-1] == 2
    assert_close(found[0], expected[0], equal_nan=True)


def test_soft_nms_by_hand():
    dets, keep = soft_nms(BOXES, SCORES, 0.3)
    assert keep.tolist() == [0, 3, 1, 2]
    # 0.8 * (1 - 1/3); 0.7 * (1 - 9/10), then * (1 - 45/145) for its overlap with box 1
    expected = [0.9, 0.6, 0.8 * 2 / 3, 0.7 / 10 * 100 / 145]
    assert_close(dets[:, 4], torch.tensor(expected))
    assert soft_nms(BOXES, SCORES, 0.3, min_score=0.1)[1].tolist() == [0, 3, 1]


@pytest.mark.parametrize("dtype", WIDE_TYPES)
@pytest.mark.parametrize("threshold", [-0.1, 0.0, 1 / 3, 0.5, 1.0])
def test_nms_match_puts_boxes_into_the_first_group_that_takes_them(threshold, dtype):
    corners, sides = torch.randint(40, (300, 2), dtype=dtype), torch.randint(9, (300, 2), dtype=dtype)
    dets = torch.cat([corners, corners + sides, torch.randint(20, (300, 1), dtype=dtype)], 1)
    dets[::17, 2] = torch.nan
    order, expected = dets[:, 4].sort(descending=True, stable=True).indices, []
    while len(order):
        joins = bbox_overlaps(dets[order[:1], :4], dets[order, :4])[0] >= threshold
        joins[0] = True
        expected.append(order[joins].tolist())
        order = order[~joins]
    with torch.device("meta"):  # what the operator makes is on the boxes' device
        assert [group.tolist() for group in nms_match(dets, threshold)] == expected


def test_batched_nms_keeps_classes_apart(backend):
    boxes, scores = BOXES[[0, 2, 2]], torch.tensor([0.5, 0.9, 0.8])
    classes = torch.tensor([0, 0, 1])
    assert batched_nms(boxes, scores, classes, dict(iou_threshold=0.5))[1].tolist() == [1, 2]
    cfg = dict(iou_threshold=0.5, class_agnostic=True)
    assert batched_nms(boxes, scores, classes, cfg)[1].tolist() == [1]
    assert cfg == dict(iou_threshold=0.5, class_agnostic=True)  # the caller's stays as it was
    assert batched_nms(boxes, scores, classes, None)[1].tolist() == [1, 2, 0]


def test_functions_of_others_are_called_for_each_class():
    seen = []

    def record(boxes, scores):
        seen.append(boxes)
        return torch.cat([boxes, scores[:, None]], 1), torch.arange(len(boxes))

    boxes = torch.tensor([[1.0, 2, 3, 4, 0.5], [2, 2, 3, 4, 0.5], [3, 2, 3, 4, 0.5]])
    dets, keep = batched_nms(boxes, torch.tensor([0.5, 0.9, 0.7]), torch.tensor([7, 0, 7]), dict(type=record))
    assert [one.tolist() for one in seen] == [boxes[1:2].tolist(), boxes[::2].tolist()]
    assert keep.tolist() == [1, 2, 0] and dets.shape == (3, 6)
    assert batched_nms(boxes[:0], boxes[:0, 0], boxes[:0, 0], dict(type=record))[0].shape == (0, 6)


REFUSED = [
    (lambda: nms_match(torch.zeros(()), 0.5), r"nms_match: dets must be \[N, 5\], got \[\]"),
    (lambda: bbox_overlaps(SCORES[0], BOXES), r"bboxes1 must be \[N, 4\], got \[\]"),
    (lambda: nms_match(BOXES, 0.5), r"nms_match: dets must be \[N, 5\], got \[4, 4\]"),
    (
        lambda: bbox_overlaps(BOXES, BOXES[:2], aligned=True),
        r"bboxes2 must be \[4, 4\] as bboxes1 where aligned, got \[2, 4\]",
    ),
    (lambda: nms(BOXES, SCORES, 0.5, classes=SCORES[:2]), r"nms: classes must be \[4\], got \[2\]"),
    (lambda: soft_nms(BOXES, SCORES, 0.5, classes=SCORES[:2]), r"soft_nms: classes must be \[4\], got \[2\]"),
    (
        lambda: batched_nms(BOXES, SCORES, torch.zeros(4).long(), dict(type="__import__('os')")),
        "type must be one of",  # It is looked up, and never evaluated.
    ),
    (
        lambda: batched_nms(BOXES, SCORES, torch.zeros(4).long(), 0.5),
        "nms_cfg must be a dict such as {'iou_threshold': 0.5}, got 0.5",
    ),
    (lambda: register_nms("nms", soft_nms), "is taken"),
    *refusals(
        torch.ops.visdet.nms,
        (BOXES, SCORES, None, None, 0.5),
        (0, torch.zeros(4, 6), "nms: boxes must have 4, 5 or 8 columns, got 6"),
        (0, BOXES.half(), "boxes must be float64 or float32, got Half"),
        (1, SCORES[1:], r"scores must be \[4\], got \[3\]"),
        (1, SCORES.double(), "scores must be Float"),
        (2, SCORES, "classes must be int64, got Float"),
        (3, SCORES, "is_candidate must be bool, got Float"),
    ),
]


def test_overlaps_by_hand():
    first, of_first = BOXES[:1], torch.tensor([[1, 1 / 3, 0.9, 0]])
    assert_close(bbox_overlaps(first, BOXES), of_first)
    assert_close(bbox_overlaps(BOXES, first, "iof")[:, 0], torch.tensor([1, 0.5, 1, 0]))
    assert_close(bbox_overlaps(BOXES[:2], BOXES[1:3], aligned=True), torch.tensor([1 / 3, 45 / 145]))
    assert_close(bbox_overlaps(first.long(), BOXES.long()), of_first)
    one = torch.tensor([[0.0, 0, 1, 1]])
    assert bbox_overlaps(one, one + torch.tensor([1.0, 0, 1, 0]), offset=1).item() == pytest.approx(2 / 6)


@pytest.mark.parametrize("M, N, aligned", [(0, 2, False), (2, 0, False), (0, 0, False), (0, 0, True)])
def test_overlaps_of_no_boxes_have_a_gradient(M, N, aligned):
    boxes = [torch.full((count, 4), torch.nan, requires_grad=True) for count in (M, N)]
    overlaps = bbox_overlaps(*boxes, aligned=aligned)
    assert overlaps.shape == (M, N)[: 2 - aligned]
    overlaps.sum().backward()
    assert all(torch.equal(given.grad, torch.zeros_like(given)) for given in boxes)


SIZES = (0, 1, 2, 3, 17, 70, 200)


def kept_by_torchvision(boxes, scores, classes, is_candidate, threshold):
    """Return the indices that ``torchvision.ops.nms`` keeps of each class, best first."""
    torchvision = pytest.importorskip("torchvision")
    classes = torch.zeros(len(boxes)) if classes is None else classes
    kept = [torch.zeros(0, dtype=torch.int64)]
    for label in classes.unique():
        is_member = (classes == label) & (True if is_candidate is None else is_candidate)
        members = is_member.nonzero().squeeze(1)
        kept.append(members[torchvision.ops.nms(boxes[members], scores[members], threshold)])
    return best_first(kept, scores)


def test_random_problems_have_torchvisions_result(backend):
    problems = [of_random_problem(seed, N) for seed, N in itertools.product(range(40), SIZES) if N]
    expected = [kept_by_torchvision(*problem) for problem in problems]
    for (boxes, scores, classes, chosen, threshold), keep in zip(problems, expected, strict=True):
        assert torch.equal(kept_indices(boxes, scores, threshold, classes, chosen), keep)


of_all_forms = pytest.mark.parametrize("columns", [4, 5, 8])


@pytest.mark.cuda
@of_all_forms
@pytest.mark.parametrize("N", [1, 63, 64, 65, 1000, 5000])
def test_the_gpu_keeps_what_the_cpu_keeps(columns, N):
    for seed in range(60 if N <= 1000 else 8):
        boxes, scores, classes, chosen, threshold = of_random_problem(seed, N, columns)
        # The compilers round the overlap of polygons differently, so that it may lie on either side of an equal number.
        threshold += 0 if columns == 4 else 1e-4
        expected = kept_indices(boxes, scores, threshold, classes, chosen)
        given = (None if one is None else one.cuda() for one in (classes, chosen))
        assert torch.equal(kept_indices(boxes.cuda(), scores.cuda(), threshold, *given).cpu(), expected), seed


def test_many_disjoint_boxes_are_kept(device):
    N = 60_000 if device == "cpu" else 400_000
    place = torch.stack([torch.arange(N) % 500, torch.arange(N) // 500], 1).float() * 10
    boxes = torch.cat([place, place + 9], 1)[torch.randperm(N, generator=generator_of(0))]
    scores = torch.arange(N, 0, -1).double()
    boxes[-1] = boxes[-3]  # only this one is suppressed
    keep = kept_indices(boxes.to(device, torch.float64), scores.to(device), 0.5)
    assert torch.equal(keep.cpu(), torch.arange(N - 1))


@pytest.mark.parametrize("axis", [0, 1])
def test_boxes_of_many_strips_have_torchvisions_result(axis):
    """From 512 boxes on the CPU divides a class into strips: wide boxes, points, and bad numbers among them."""
    generator = generator_of(axis)
    for dtype in WIDE_TYPES:
        corner = torch.rand(3000, 2, generator=generator).to(dtype) * torch.tensor([1e4, 300.0]).roll(axis)
        sides = torch.rand(3000, 2, generator=generator).to(dtype) * 40
        sides[::50, axis] *= 200
        sides[::70] = 0
        boxes = torch.cat([corner, corner + sides], 1)
        boxes[7, 0], boxes[8, 3], boxes[9, 2], boxes[10] = torch.nan, torch.inf, -torch.inf, boxes[11]
        boxes[12] = boxes[12].flip(0)
        scores = torch.rand(3000, generator=generator).to(dtype)
        for threshold in (0.0, 0.3, -0.1):
            keep = kept_indices(boxes, scores, threshold)
            assert torch.equal(keep, kept_by_torchvision(boxes, scores, None, None, threshold))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("kind", ["nms", *SOFT_METHODS])
def test_every_class_is_suppressed_as_if_alone(kind, dtype, device):
    """Far from the origin and with many classes, where moving classes apart would round the overlaps."""
    corner = torch.rand(300, 2).repeat_interleave(3, 0) * 20000
    corner = corner + torch.rand(900, 2) * 6
    boxes, scores = (
        torch.cat([corner, corner + 12], 1).to(device, dtype),
        torch.rand(900),
    )
    scores = scores.to(device, torch.promote_types(dtype, torch.float32))
    classes = (torch.randint(-600, 600, (300,)).repeat_interleave(3) * 2**33).to(device)
    suppress, settings = (nms, {}) if kind == "nms" else (soft_nms, dict(method=kind, min_score=0.05))
    cfg = dict(type=suppress.__name__, iou_threshold=0.4, **settings)
    dets, keep = batched_nms(boxes, scores, classes, cfg)
    expected = {}
    for label in classes.unique():
        members = (classes == label).nonzero().squeeze(1)
        alone, kept = suppress(boxes[members], scores[members], 0.4, **settings)
        expected |= dict(zip(members[kept].tolist(), alone[:, -1].to(dtype).tolist(), strict=True))
    assert dict(zip(keep.tolist(), dets[:, -1].tolist(), strict=True)) == expected
    assert (dets[:-1, -1] >= dets[1:, -1]).all() and torch.equal(dets[:, :4], boxes[keep])


@pytest.mark.parametrize("classes", [[0.5, 0.5, 0.25], [-0.0, 0.0, 1.0], [True, True, False]])
def test_classes_may_be_any_numbers(classes):
    boxes, scores = torch.tensor([[0.0, 0, 9, 9]]).repeat(3, 1), torch.tensor([0.9, 0.8, 0.7])
    for suppress in (nms, soft_nms):
        assert suppress(boxes, scores, 0.5, classes=torch.tensor(classes))[1].tolist() == [0, 2]
    assert nms(boxes.numpy(), scores.numpy(), 0.5, classes=torch.tensor(classes).numpy())[1].tolist() == [
        0,
        2,
    ]


def test_registrations():
    boxes, scores, *_ = of_random_problem(1, 20, dtype=torch.float32)
    for columns, classes, chosen in (
        (4, None, None),
        (5, torch.arange(20) % 3, None),
        (8, None, scores > 0.3),
    ):
        given = (boxes.repeat(1, 2)[:, :columns], scores, classes, chosen, 0.3)
        opcheck(torch.ops.visdet.nms.default, given)


COMPILED = {
    "nms": lambda boxes, scores, classes: nms(boxes[:, :4], scores, 0.3, 1, 0.2, classes=classes),
    "batched_nms": lambda boxes, scores, classes: batched_nms(
        boxes[:, :4], scores, classes, dict(iou_threshold=0.3, max_num=9)
    ),
    "batched_soft_nms": lambda boxes, scores, classes: batched_nms(
        boxes[:, :4], scores, classes, dict(type="soft_nms", iou_threshold=0.3)
    ),
    "nms_rotated": lambda boxes, scores, classes: nms_rotated(boxes[:, :5], scores, 0.3, classes, False),
    "nms_quadri": lambda boxes, scores, classes: nms_quadri(boxes, scores, 0.3, classes),
}


@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_serves_all_sizes(name):
    torch._dynamo.reset()
    compiled = torch.compile(COMPILED[name], fullgraph=True, dynamic=True, backend="eager")
    boxes, scores, classes = torch.rand(60, 8) * 9, torch.rand(60), torch.arange(60) % 3
    for N in (2, 0, 1, 60):
        given = boxes[:N], scores[:N], classes[:N]
        assert_close(compiled(*given), COMPILED[name](*given), rtol=0, atol=0)


CLOSE = torch.tensor([0.5, 0.5 + 1e-12, 0.5 - 1e-12], dtype=torch.float64)  # equal in float32


@pytest.mark.parametrize("has_classes", [False, True])
@pytest.mark.parametrize("kind", ["nms", "soft_nms", "nms_rotated", "nms_quadri"])
def test_scores_are_ranked_in_their_own_type(kind, has_classes):
    """Float64 scores of float32 boxes decide which box stays, and are returned as they were given."""
    box = {"nms_rotated": [5.0, 5.0, 4.0, 4.0, 0.0], "nms_quadri": [3.0, 3, 7, 3, 7, 7, 3, 7]}.get(
        kind, [3.0, 3, 7, 7]
    )
    boxes = torch.tensor([box] * 3)
    detections, keep = batched_nms(
        boxes, CLOSE, torch.zeros(3), dict(type=kind, iou_threshold=0.5), class_agnostic=not has_classes
    )
    assert keep.tolist() == [1] and detections[0, -1] == CLOSE[1]


@pytest.mark.parametrize("threshold, kept", [(0.5, [0, 1]), (math.nextafter(0.5, 0), [0])])
def test_a_box_that_overlaps_by_the_threshold_is_kept(threshold, kept, device):
    boxes = torch.tensor([[0.0, 0, 2, 1], [0, 0, 1, 1]], device=device)
    scores = torch.tensor([0.9, 0.8], device=device)
    assert nms(boxes, scores, threshold)[1].tolist() == kept
    assert nms(boxes, scores, threshold, score_threshold=0.8)[1].tolist() == [0]  # 0.8 is not above 0.8


@pytest.mark.parametrize("suppress", [nms3d, nms3d_normal])
def test_scores_of_boxes_in_space_are_ranked_in_their_own_type(suppress):
    boxes = torch.tensor([[0.0, 0, 0, 2, 2, 2, 0]] * 3)
    assert suppress(boxes, CLOSE, 0.5).tolist() == [1]
    assert suppress(boxes, torch.tensor([2**40, 2**40 + 1, 2**40 - 1]), 0.5).tolist() == [1]
    assert suppress(boxes, torch.tensor([0.1, torch.nan, 0.3], dtype=torch.float64), 0.5).tolist() == [1]


PROGRAM = """
#include "cuda/nms/boxes.cuh"
#include "cuda/nms/suppress.cuh"

using namespace visdet;
using namespace visdet::nms;

template <typename Boxes, typename A>
int64_t run(const Boxes& rule, const A* boxes, const int64_t* order, const int64_t* ranks, const int64_t* classes,
            const bool* is_candidate, int32_t N, int64_t* keep) {
  const int tiles = (N + kTile - 1) / kTile;
  std::vector<typename Boxes::Box> sorted(N);
  std::vector<int32_t> starts(N);
  std::vector<uint64_t> words(2 * tiles);
  std::vector<uint4> is_kept(tiles * kTile / 16);
  uint32_t next_tile = 0;
  int64_t count = 0;
  uint8_t* flags = reinterpret_cast<uint8_t*>(is_kept.data());
  emulated::run_grid((N + kPrepareThreads - 1) / kPrepareThreads, 1, kPrepareThreads, [&] {
    prepare_kernel<Boxes>(boxes, order, ranks, classes, is_candidate, N, sorted.data(), starts.data());
  });
  emulated::run_grid(tiles, 1, kThreads, [&] {
    suppress_kernel(rule, sorted.data(), starts.data(), ranks, N, Progress{words.data(), &next_tile}, flags);
  });
  const int blocks = (tiles * kTile + kSelectThreads * kFlagsOfThread - 1) / (kSelectThreads * kFlagsOfThread);
  emulated::run_grid(blocks, 1, kSelectThreads, [&] { select_kernel(flags, order, tiles * kTile, keep, &count); });
  return count;
}

template <typename A>
int64_t dispatch(int columns, double threshold, const A* boxes, const int64_t* order, const int64_t* ranks,
                 const int64_t* classes, const bool* is_candidate, int32_t N, int64_t* keep) {
  const auto with = [&](const auto& rule) { return run(rule, boxes, order, ranks, classes, is_candidate, N, keep); };
  if (columns == 5) return with(Polygons<A, true>{static_cast<A>(threshold)});
  if (columns == 8) return with(Polygons<A, false>{static_cast<A>(threshold)});
  const AlignedLimit<A> limit(threshold);
  return with(AlignedBoxes<A>{limit.limit, limit.low});
}

extern "C" int64_t suppress(bool is_double, int columns, double threshold, const void* boxes, const int64_t* order,
                            const int64_t* ranks, const int64_t* classes, const bool* is_candidate, int32_t N,
                            int64_t* keep) {
  return is_double ? dispatch(columns, threshold, static_cast<const double*>(boxes), order, ranks, classes,
                              is_candidate, N, keep)
                   : dispatch(columns, threshold, static_cast<const float*>(boxes), order, ranks, classes,
                              is_candidate, N, keep);
}
"""


def kept_by_emulation(library, boxes, scores, classes, is_candidate, threshold):
    order = scores.sort(descending=True, stable=True).indices
    ranks = by_class = None
    if classes is not None:
        by_class, ranks = classes[order].sort(stable=True)
    N, columns = boxes.shape
    keep = torch.empty(N, dtype=torch.int64)
    given = (boxes, order, ranks, by_class, is_candidate)
    is_double = boxes.dtype == torch.float64
    return keep[: called(library.suppress, is_double, columns, float(threshold), *given, N, keep)]


@of_all_forms
def test_kernels_keep_what_the_cpu_keeps(library, columns):
    sizes = [1, 2, 63, 64, 65, 130, 300]
    for seed, N in itertools.product(range(6 if columns == 4 else 2), sizes):
        problem = of_random_problem(seed, N, columns)
        expected = torch.ops.visdet.nms(*problem)
        assert torch.equal(kept_by_emulation(library, *problem), expected), (seed, N)
