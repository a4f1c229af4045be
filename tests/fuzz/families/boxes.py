"""Problems of bbox_overlaps, nms, batched_nms and soft_nms."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz import sizes
from tests.fuzz.problem import Draw, Operator, Problem
from visdet.ops import (
    batched_nms,
    bbox_overlaps,
    nms,
    soft_nms,
)
from visdet.ops.soft_nms import SOFT_METHODS, soft_nms_reference

__all__ = ["OPERATORS"]


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
        "bboxes1": draw.place(draw.with_bad_numbers(_rows(draw, M, whole)), dtype),
        "bboxes2": draw.place(
            draw.with_bad_numbers(_rows(draw, N, whole)), draw.dtype(dtype, dtype, torch.float32)
        ),
        "mode": draw.pick("iou", "iof"),
        "aligned": aligned,
        "offset": offset,
    }
    exact = all(arguments[name].dtype in (torch.float32, torch.float64) for name in ("bboxes1", "bboxes2"))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Problem(
        arguments,
        differentiable=("bboxes1", "bboxes2"),
        wide=wide,
        error_factor=4000.0,
        skip={"bboxes1": unsure or not exact, "bboxes2": unsure or not exact},
    )


def _overlap_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    bounds["output"] = 1.0
    for name in ("bboxes1", "bboxes2"):
        if name in bounds:
            bounds[name] = 32 * bounds.get("grad_total", 0.0)


def random_scores(draw: Draw, count: int) -> Tensor:
    scores = draw.uniform(0, 1, count)
    return (scores * 8).round() / 8 if draw.chance(0.3) else scores  # ties


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
    order = scores.sort(descending=True, stable=True).indices.tolist()
    near = (_overlap_matrix(boxes, offset) > iou_threshold).tolist()
    kept: list[int] = []
    for i in order:
        if not (score_threshold > 0 and not float(scores[i]) > score_threshold) and not any(
            near[j][i] for j in kept
        ):
            kept.append(i)
    kept = kept[:max_num] if max_num > 0 else kept
    keep = torch.tensor(kept, dtype=torch.int64, device=boxes.device)
    return torch.cat([boxes[keep], scores[keep, None]], 1), keep


def same_kept(problem: Problem, got: tuple[Tensor, Tensor], expected: dict[str, Any]) -> str:
    """Compare detections and kept indices."""
    count = len(problem.arguments["boxes"])
    keep = got[1]
    if keep.numel() and not bool(((keep >= 0) & (keep < count)).all()):
        return f"kept indices {keep.tolist()} of {count} boxes"
    if problem.skip["output"]:
        return ""
    if keep.tolist() != expected["output 1"].tolist():
        return f"kept {keep.tolist()}, expected {expected['output 1'].tolist()}"
    if not torch.allclose(got[0].double(), expected["output"], rtol=1e-5, atol=1e-5):
        return "boxes or scores differ"
    return ""


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


def _batched(boxes: Tensor, scores: Tensor, idxs: Tensor, nms_cfg: dict) -> tuple[Tensor, Tensor]:
    if nms_cfg["type"] != "nms":
        return boxes[:0], idxs[:0]
    kept = []
    for label in idxs.unique().tolist():
        members = (idxs == label).nonzero().squeeze(1)
        kept.append(members[_nms(boxes[members], scores[members], nms_cfg["iou_threshold"], 0)[1]])
    keep = torch.cat(kept).sort().values if kept else idxs[:0]
    keep = keep[scores[keep].sort(descending=True, stable=True).indices][: nms_cfg.get("max_num")]
    return torch.cat([boxes[keep], scores[keep, None]], 1), keep


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


@st.composite
def launches_of_nms(draw: st.DrawFn) -> dict[str, Any]:
    N, dtype = draw(st.one_of(sizes.count, st.sampled_from([400_000]))), draw(sizes.value_types)
    classes = sizes.empty(N, dtype=torch.int64) if draw(st.booleans()) else None
    threshold = draw(st.sampled_from([0, 0.3]))
    return {
        "boxes": sizes.empty(N, 4, dtype=dtype),
        "scores": sizes.empty(N, dtype=dtype),
        "iou_threshold": 0.5,
        "score_threshold": threshold,
        "classes": classes,
    }


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
        spoiled={"boxes": ("rank", 0, 1), "scores": ("rank", 0)},
        launches=launches_of_nms,
    ),
    Operator("batched_nms", batched_nms, _draw_batched, _batched, compare=same_kept, aliases=("nms",)),
    Operator(
        "soft_nms",
        soft_nms,
        _draw_soft,
        _soft,
        compare=_same_soft,
        spoiled={"boxes": ("rank", 0, 1), "scores": ("rank", 0)},
    ),
)
