"""Suppression that lowers the scores of overlapping boxes instead of removing them."""

from typing import Any

import torch
from torch import Tensor

from . import _registration
from ._arguments import check_that, computation_dtype, floating, numbers_to
from ._classes import check_classes, class_by_class, highest_first
from ._declared import declared
from ._renamed import renamed_arguments
from .nms import overlaps_with

__all__ = ["SOFT_METHODS", "soft_nms", "soft_nms_reference"]

SOFT_METHODS = ("naive", "linear", "gaussian")


@renamed_arguments(iou_thr="iou_threshold")
@declared(
    boxes="array or real [N, 4]",
    scores="array or real [N]",
    iou_threshold="number",
    sigma="number",
    min_score="number",
    method=f"one of {SOFT_METHODS}",
    offset="one of 0, 1",
)
def soft_nms(
    boxes: Any,  # [N, 4] (x1, y1, x2, y2)
    scores: Any,  # [N]
    iou_threshold: float = 0.3,
    sigma: float = 0.5,
    min_score: float = 1e-3,
    method: str = "linear",
    offset: int = 0,
    classes: Any = None,  # [N]
) -> tuple[Any, Any]:  # [M, 5] boxes and lowered scores, [M] int64
    """Return the boxes with scores lowered by how much better boxes overlap them, best first, and their indices.

    With o the IoU with a better box, a score is multiplied by 0 (``naive``) or 1 - o (``linear``) where
    o >= ``iou_threshold``, or by exp(-o² / ``sigma``) (``gaussian``). A box whose score falls below ``min_score`` is
    removed.

    Args:
        boxes: [N, 4] (x1, y1, x2, y2). Boxes in any unit, a tensor or a NumPy array. 16-bit types are computed in
            float32. Integers are converted to float32.
        scores: [N]. The score of each box. float64 scores are lowered in float64. NaN scores come last.
        iou_threshold: The overlap from which ``naive`` and ``linear`` lower a score.
        sigma: The width of ``gaussian``, for which it must be positive.
        min_score: The score below which a box is removed.
        method: 'naive', 'linear' or 'gaussian'.
        offset: 0, or 1 for widths and heights of x2 - x1 + 1.
        classes: [N]. The class of each box, any numbers. Boxes of different classes do not lower each other's scores.
            The default is one class for all.

    Returns:
        [M, 5] and [M]. The boxes with their lowered scores, and int64 indices, as tensors or as NumPy arrays like the
        arguments. A NaN overlap counts as 0.

    It is not differentiable. It runs on the CPU whatever the device: each round needs the result of the one before, and
    a thousand rounds cost less there, copies included, than as many synchronisations of a GPU's blocks.

    Raises:
        ValueError: A shape, ``offset``, ``method`` or ``sigma`` does not fit. The message names the argument.

    Source: Soft-NMS, arXiv 1704.04503; the signature and the order of equal scores are mmcv's.
    """
    boxes = floating(boxes)
    check_that(method != "gaussian" or sigma > 0, "soft_nms", "sigma", "be positive", sigma)
    dtype, given = (
        torch.promote_types(computation_dtype(boxes), scores.dtype),
        torch.promote_types(boxes.dtype, scores.dtype),
    )
    on_host, host_scores = boxes.detach().to("cpu", dtype), scores.detach().to("cpu", dtype)
    classes = check_classes("soft_nms", "classes", classes, on_host)
    settings = (iou_threshold, sigma, min_score, SOFT_METHODS.index(method), offset)
    detections, keep = _soft_nms(on_host, host_scores, classes, *settings)
    if classes is not None:
        detections, keep = highest_first(detections, keep)
    return detections.to(boxes.device, given), keep.to(boxes.device)


def soft_nms_reference(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """Return what ``soft_nms`` returns of float32 or float64 tensors on the CPU; ``method`` counts SOFT_METHODS.

    Each round takes the best box to the front, lowers the scores of the others and drops those below
    ``min_score``: a hole left by a dropped box is filled from the end, which decides the order of equal scores.
    """
    boxes, scores = boxes.clone(), scores.clone()
    index = numbers_to(len(scores), scores)
    columns = boxes, scores, index
    kind = SOFT_METHODS[method]
    count, i = len(scores), 0
    while i < count:
        best = i + int(scores[i:count].nan_to_num(-torch.inf, torch.inf, -torch.inf).argmax())
        swap = index.new_tensor([i, best])
        for column in columns:
            column[swap] = column[swap.flip(0)]
        after = i + 1
        rest = slice(after, count)
        overlap = overlaps_with(boxes[i], boxes[rest], offset).nan_to_num(nan=0)  # two boxes without area
        if kind == "gaussian":
            factor = torch.exp(-overlap.square() / sigma)
        else:
            lowered = 1 - overlap if kind == "linear" else 0.0
            factor = torch.where(overlap >= iou_threshold, lowered, 1.0)
        scores[rest] *= factor
        is_low = scores[rest] < min_score
        num_high = int((~is_low).sum())
        survivors = after + num_high
        holes = after + is_low[:num_high].nonzero().squeeze(1)
        fillers = (survivors + (~is_low[num_high:]).nonzero().squeeze(1)).flip(0)
        for column in columns:
            column[holes] = column[fillers]
        count, i = survivors, after
    return torch.cat([boxes[:count], scores[:count, None]], 1), index[:count]


def _of_each_class(
    boxes: Tensor, scores: Tensor, classes: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    def suppress(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        return soft_nms_reference(boxes, scores, *settings)

    return suppress(boxes, scores) if classes is None else class_by_class(suppress, boxes, scores, classes)


def _results(given: Any) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return given.boxes.new_empty(count, 5), given.boxes.new_empty(count, dtype=torch.int64)


_soft_nms = _registration.without_gradient("soft_nms", _results, _of_each_class)
