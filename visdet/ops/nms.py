"""Non-maximum suppression of boxes, also with the groups that it forms."""

from typing import Any

import torch
from torch import Tensor

from . import _library, _registration
from ._arguments import check_that, constant, floating, numbers_to
from ._classes import check_classes
from ._declared import declared
from ._renamed import renamed_arguments
from .box_iou_rotated import box_iou_rotated_reference

__all__ = ["nms", "nms_match"]

PAIRS_AT_ONCE = 1 << 17  # of boxes that nms_match compares at a time, in the processor's cache


@renamed_arguments(iou_thr="iou_threshold")
@declared(
    boxes="array or real [N, 4]",
    scores="array or real [N]",
    iou_threshold="number",
    offset="one of 0, 1",
    score_threshold="number",
    max_num="integer",
)
def nms(
    boxes: Any,  # [N, 4] (x1, y1, x2, y2)
    scores: Any,  # [N]
    iou_threshold: float,
    offset: int = 0,
    score_threshold: float = 0,
    max_num: int = -1,
    classes: Any = None,  # [N]
) -> tuple[Any, Any]:  # [M, 5] boxes and scores, [M] int64
    """Return the boxes that no better box overlaps by more than ``iou_threshold``, best score first, and their indices.

    Args:
        boxes: [N, 4] (x1, y1, x2, y2). Boxes in any unit, a tensor or a NumPy array. 16-bit types are compared in
            float32. Integers are converted to float32.
        scores: [N]. The score of each box. Of equal scores the lower index comes first. NaN scores come first, as in
            ``torch.sort``.
        iou_threshold: A box is suppressed if its IoU with a kept one is greater, compared in float64.
        offset: 0, or 1 for widths and heights of x2 - x1 + 1, as pixels were counted in mmdet 1.
        score_threshold: Where it is positive, boxes with a score not above it are removed first.
        max_num: The largest number of boxes to keep; -1 or 0 keeps all.
        classes: [N]. The class of each box, any numbers. Boxes of different classes do not suppress each other: the
            result is that of every class alone. The default is one class for all.

    Returns:
        [M, 5] and [M]. The boxes with their scores, and int64 indices, as tensors or as NumPy arrays like the
        arguments. No boxes give an empty [0, 5] and empty indices. A box with a NaN corner suppresses no other box and
        is kept.

    The result [M, 5] is differentiable with respect to boxes and scores, because it is a selection. The indices are
    not. It is deterministic: the boxes, their order and the arithmetic are those of ``torchvision.ops.nms`` on the CPU,
    on every device. On a GPU, the host waits once, for the number of boxes. Where the library is not built, plain torch
    serves it.

    Raises:
        ValueError: A shape or ``offset`` does not fit. The message names the argument.

    Source: The signature is mmcv's, ``classes`` apart.
    """
    boxes = floating(boxes)  # A score in a tensor with integer boxes would be cut to a whole number.
    classes = check_classes("nms", "classes", classes, boxes)
    is_candidate = scores > score_threshold if score_threshold > 0 else None
    if offset:  # A box whose sides are longer by one is the same as a box that ends one later.
        wide = constant(boxes, boxes)
        compared = torch.cat([wide[:, :2], wide[:, 2:] + offset], 1)
    else:
        compared = boxes
    table = torch.cat([boxes, scores[:, None]], 1)  # before the host waits for the number of boxes
    keep = kept_indices(compared, scores, iou_threshold, classes, is_candidate)
    if max_num > 0:
        keep = keep[:max_num]
    return table.index_select(0, keep), keep


@declared(dets="array or real", iou_threshold="number")
def nms_match(dets: Any, iou_threshold: float) -> list[Any]:
    """Return one group of indices per kept box: its own index, then the boxes that it suppressed, best first.

    Args:
        dets: [N, 5] boxes (x1, y1, x2, y2) and scores, a tensor or a NumPy array. NaN scores come first.
        iou_threshold: A box joins the first group whose kept box it overlaps by at least this. A box with a NaN corner
            overlaps none.

    Returns:
        The groups, int64, as tensors or as NumPy arrays like the argument. It is not differentiable.

    Raises:
        ValueError: The shape does not fit.

    Source: mmcv; prime sample attention (PISA), arXiv 1904.04821, uses it.
    """
    if dets.dim() and dets.shape[0] == 0:
        return []
    check_that(dets.dim() == 2 and dets.shape[1] == 5, "nms_match", "dets", "be [N, 5]", dets)
    table = constant(dets.cpu(), dets)
    boxes, scores = table[:, :4], table[:, 4]
    threshold = table.new_tensor(iou_threshold)
    # An overlap is at least the threshold if it is greater than the next smaller number.
    leaders = kept_indices(boxes, scores, threshold.nextafter(torch.full_like(threshold, -torch.inf)).item())
    order = scores.sort(descending=True, stable=True).indices
    group = torch.full_like(order, -1)
    group[leaders] = numbers_to(len(leaders), group)
    for members in order[group[order] < 0].split(PAIRS_AT_ONCE // len(leaders) + 1):
        overlaps = overlaps_with(boxes[members, None], boxes[leaders], 0)
        group[members] = (overlaps >= iou_threshold).byte().argmax(1)
    order = order[group[order].sort(stable=True).indices].to(dets.device)
    return list(order.split(group.bincount().tolist()))


def kept_indices(
    boxes: Tensor,  # [N, 4], [N, 5] (x, y, w, h, angle) or [N, 8] four corners
    scores: Tensor,  # [N]
    iou_threshold: float,
    classes: Tensor | None = None,  # [N] int64
    is_candidate: Tensor | None = None,  # [N] bool
) -> Tensor:
    """Return the indices of the boxes that stay, best score first. Boxes that are no candidates do not take part."""
    boxes = constant(boxes, boxes)
    scores = scores.detach()
    if not scores.is_floating_point() or torch.promote_types(scores.dtype, boxes.dtype) != boxes.dtype:
        # Rounding would make ties. Ranks have the same order.
        scores = -scores.sort(descending=True, stable=True).indices.argsort()
    scores = scores.to(boxes)
    if not _library.serves(boxes) and _library.is_loaded("cpu"):
        tensors = (None if one is None else one.cpu() for one in (boxes, scores, classes, is_candidate))
        return _nms(*tensors, iou_threshold).to(boxes.device)
    return _nms(boxes, scores, classes, is_candidate, iou_threshold)


def kept_by_plain_torch(
    boxes: Tensor,
    scores: Tensor,
    classes: Tensor | None,
    is_candidate: Tensor | None,
    iou_threshold: float,
) -> Tensor:
    """Return the indices that greedy suppression keeps, by plain torch on the CPU. Their order is torchvision's."""
    width = boxes.shape[1]
    order = scores.sort(descending=True, stable=True).indices
    order = (order if is_candidate is None else order[is_candidate[order]]).cpu()
    ordered = boxes.cpu()[order]
    of_class = None if classes is None else classes.cpu()[order]
    is_alive = torch.ones_like(order, dtype=torch.bool)
    dtype = torch.float64 if width == 4 else boxes.dtype  # torchvision compares in float64
    threshold = ordered.new_tensor(iou_threshold, dtype=dtype)
    for i in range(len(order)):
        if is_alive[i]:
            after = i + 1
            rest = ordered[after:]
            if width == 4:
                overlap = overlaps_with(ordered[i], rest, 0).double()
            else:
                overlap = box_iou_rotated_reference(ordered[i:after], rest, 0, False)[0]
            is_equal = True if of_class is None else of_class[after:] == of_class[i]
            is_alive[after:] &= ~((overlap > threshold) & is_equal)
    return order[is_alive].to(boxes.device)


def with_scores(boxes: Tensor, keep: Tensor, kept_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the boxes that are kept, each with its score, and their indices."""
    return torch.cat([boxes[keep], kept_scores[:, None]], 1), keep


def overlaps_with(box: Tensor, boxes: Tensor, offset: int) -> Tensor:
    """Return the IoU of a box [..., 4] with each of boxes [..., 4]. Widths are x2 - x1 + offset."""
    shared, area, areas = areas_of(box, boxes, offset)
    return shared / (area + areas - shared)


def areas_of(boxes: Tensor, others: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what boxes [..., 4] share with others, and the areas of both. Widths are x2 - x1 + offset."""
    ends = torch.minimum(boxes[..., 2:], others[..., 2:])
    starts = torch.maximum(boxes[..., :2], others[..., :2])
    area, areas = ((one[..., 2:] - one[..., :2] + offset).prod(-1) for one in (boxes, others))
    return (ends - starts + offset).clamp(min=0).prod(-1), area, areas


_nms = _registration.without_gradient(
    "nms",
    lambda given: given.boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64),
    kept_by_plain_torch,
)
