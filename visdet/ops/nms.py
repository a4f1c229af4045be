"""Non-maximum suppression of one set of boxes, also with soft scores or with the groups that it forms."""

from typing import Any

import torch
from torch import Tensor

from . import _library, _torchvision
from ._renamed import renamed_arguments

__all__ = ["nms", "nms_match", "soft_nms", "soft_nms_reference"]

SOFT_METHODS = ("naive", "linear", "gaussian")


@renamed_arguments(iou_thr="iou_threshold")
def nms(
    boxes: Any,  # [N, 4] (x1, y1, x2, y2)
    scores: Any,  # [N]
    iou_threshold: float,
    offset: int = 0,
    score_threshold: float = 0,
    max_num: int = -1,
) -> tuple[Any, Any]:  # [M, 5] boxes and scores, [M] int64
    """Return the boxes that no better box overlaps by more than ``iou_threshold``, best score first, and their indices.

    Args:
        boxes: [N, 4] (x1, y1, x2, y2). Boxes in any unit, a tensor or a NumPy array. 16-bit types are compared in
            float32. Integers are converted to float32.
        scores: [N]. The score of each box. Of equal scores the lower index comes first on the CPU. NaN scores come
            first, as in ``torch.sort``.
        iou_threshold: A box is suppressed if its IoU with a kept one is greater.
        offset: 0, or 1 for widths and heights of x2 - x1 + 1, as pixels were counted in mmdet 1.
        score_threshold: Where it is positive, boxes with a score not above it are removed first.
        max_num: The largest number of boxes to keep; -1 or 0 keeps all.

    Returns:
        [M, 5] and [M]. The boxes with their scores, and int64 indices, as tensors or as NumPy arrays like the
        arguments. No boxes give an empty [0, 5] and empty indices. A box with a NaN corner suppresses no other box and
        is kept.

    The result [M, 5] is differentiable with respect to boxes and scores, because it is a selection. The indices are
    not. torchvision serves it. If torchvision is missing, plain torch gives the same.

    Raises:
        ValueError: A shape or ``offset`` does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    boxes, scores, is_numpy = as_tensors("nms", boxes, scores, offset)
    if score_threshold > 0:
        valid = (scores > score_threshold).nonzero().squeeze(1)
        keep = valid[kept_indices(boxes[valid], scores[valid], float(iou_threshold), offset)]
    else:
        keep = kept_indices(boxes, scores, float(iou_threshold), offset)
    if max_num > 0:
        keep = keep[:max_num]
    detections = torch.cat([boxes[keep], scores[keep, None]], 1)
    return (detections.numpy(), keep.numpy()) if is_numpy else (detections, keep)


@renamed_arguments(iou_thr="iou_threshold")
def soft_nms(
    boxes: Any,  # [N, 4] (x1, y1, x2, y2)
    scores: Any,  # [N]
    iou_threshold: float = 0.3,
    sigma: float = 0.5,
    min_score: float = 1e-3,
    method: str = "linear",
    offset: int = 0,
) -> tuple[Any, Any]:  # [M, 5] boxes and lowered scores, [M] int64
    """Return the boxes with scores lowered by how much better boxes overlap them, best first, and their indices.

    With o the IoU with a better box, a score is multiplied by 0 (``naive``) or 1 - o (``linear``) where
    o >= ``iou_threshold``, or by exp(-o² / ``sigma``) (``gaussian``). A box whose score falls below ``min_score`` is
    removed.

    Args:
        boxes: [N, 4] (x1, y1, x2, y2). Boxes in any unit, a tensor or a NumPy array. 16-bit types are computed in
            float32. Integers are converted to float32.
        scores: [N]. The score of each box. NaN scores come last.
        iou_threshold: The overlap from which ``naive`` and ``linear`` lower a score.
        sigma: The width of ``gaussian``, for which it must be positive.
        min_score: The score below which a box is removed.
        method: 'naive', 'linear' or 'gaussian'.
        offset: 0, or 1 for widths and heights of x2 - x1 + 1.

    Returns:
        [M, 5] and [M]. The boxes with their lowered scores, and int64 indices, as tensors or as NumPy arrays like the
        arguments. A NaN overlap counts as 0.

    It is not differentiable. It runs on the CPU whatever the device: each round needs the result of the one before, and
    a thousand rounds cost less there, copies included, than as many synchronisations of a GPU's blocks.

    Raises:
        ValueError: A shape, ``offset``, ``method`` or ``sigma`` does not fit. The message names the argument.

    Source: Soft-NMS, arXiv 1704.04503; the signature and the order of equal scores are mmcv's.
    """
    boxes, scores, is_numpy = as_tensors("soft_nms", boxes, scores, offset)
    if method not in SOFT_METHODS:
        raise ValueError(f"soft_nms: method must be one of {SOFT_METHODS}, got {method!r}")
    if method == "gaussian" and not sigma > 0:
        raise ValueError(f"soft_nms: sigma must be positive, got {sigma!r}")
    dtype = boxes.dtype if boxes.dtype in (torch.float32, torch.float64) else torch.float32
    run = torch.ops.visdet.soft_nms if _library.is_loaded("cpu") else soft_nms_reference
    detections, keep = run(
        boxes.detach().to("cpu", dtype),
        scores.detach().to("cpu", dtype),
        float(iou_threshold),
        float(sigma),
        float(min_score),
        SOFT_METHODS.index(method),
        offset,
    )
    if is_numpy:
        return detections.to(boxes.dtype).numpy(), keep.numpy()
    return detections.to(boxes), keep.to(boxes.device)


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
    index = torch.arange(len(scores))
    count, i = len(scores), 0
    while i < count:
        best = i + int(scores[i:count].nan_to_num(-torch.inf, torch.inf, -torch.inf).argmax())
        swap = torch.tensor([i, best])
        for column in (boxes, scores, index):
            column[swap] = column[swap.flip(0)]
        rest = slice(i + 1, count)
        overlap = _overlaps_with(boxes[i], boxes[rest], offset).nan_to_num(nan=0)  # two boxes without area
        if SOFT_METHODS[method] == "gaussian":
            scores[rest] *= torch.exp(-overlap.square() / sigma)
        else:
            factor = 1 - overlap if SOFT_METHODS[method] == "linear" else torch.zeros_like(overlap)
            scores[rest] *= torch.where(overlap >= iou_threshold, factor, torch.ones_like(overlap))
        is_low = scores[rest] < min_score
        survivors = i + 1 + int((~is_low).sum())
        holes = i + 1 + is_low[: survivors - i - 1].nonzero().squeeze(1)
        fillers = (survivors + (~is_low[survivors - i - 1 :]).nonzero().squeeze(1)).flip(0)
        for column in (boxes, scores, index):
            column[holes] = column[fillers]
        count, i = survivors, i + 1
    return torch.cat([boxes[:count], scores[:count, None]], 1), index[:count]


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
    is_numpy = not isinstance(dets, Tensor)
    table = torch.from_numpy(dets) if is_numpy else dets.detach()
    if table.dim() and table.shape[0] == 0:
        return []
    if table.dim() != 2 or table.shape[1] != 5:
        raise ValueError(f"nms_match: dets must be [N, 5], got {list(table.shape)}")
    table = table.cpu() if table.dtype == torch.float64 else table.cpu().float()
    order = table[:, 4].sort(descending=True, stable=True).indices
    groups = []
    while len(order):
        overlap = _overlaps_with(table[order[0], :4], table[order[1:], :4], 0)
        joins = overlap >= iou_threshold
        groups.append(torch.cat([order[:1], order[1:][joins]]))
        order = order[1:][~joins]
    return [group.numpy() if is_numpy else group.to(dets.device) for group in groups]


def kept_indices(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Return the indices of the boxes that stay, best score first."""
    boxes, scores = boxes.detach(), scores.detach()
    if boxes.dtype not in (torch.float32, torch.float64):
        boxes, scores = boxes.float(), scores.float()
    scores = scores.to(boxes.dtype)
    if offset:  # A box whose sides are longer by one is the same as a box that ends one later.
        boxes = boxes + boxes.new_tensor([0, 0, offset, offset])
    if _torchvision.serves(boxes.device.type):
        from torchvision.ops import nms as torchvision_nms

        return torchvision_nms(boxes, scores, iou_threshold)
    return kept_by_plain_torch(boxes, scores, iou_threshold)


def kept_by_plain_torch(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the indices that greedy suppression keeps, by plain torch on the CPU. Their order is torchvision's."""
    order = scores.sort(descending=True, stable=True).indices.cpu()
    ordered = boxes.cpu()[order]
    is_alive = torch.ones(len(order), dtype=torch.bool)
    for i in range(len(order)):
        if is_alive[i]:
            is_alive[i + 1 :] &= ~(_overlaps_with(ordered[i], ordered[i + 1 :], 0) > iou_threshold)
    return order[is_alive].to(boxes.device)


def as_tensors(op: str, boxes: Any, scores: Any, offset: int) -> tuple[Tensor, Tensor, bool]:
    """Return boxes and scores as tensors, and whether they are NumPy arrays. Raise ValueError if one does not fit."""
    is_numpy = not isinstance(boxes, Tensor)
    boxes = boxes if isinstance(boxes, Tensor) else torch.from_numpy(boxes)
    scores = scores if isinstance(scores, Tensor) else torch.from_numpy(scores)
    if boxes.dim() != 2 or boxes.shape[1] != 4:
        raise ValueError(f"{op}: boxes must be [N, 4], got {list(boxes.shape)}")
    if scores.shape != boxes.shape[:1]:
        raise ValueError(f"{op}: scores must be [{boxes.shape[0]}], got {list(scores.shape)}")
    if offset not in (0, 1):
        raise ValueError(f"{op}: offset must be 0 or 1, got {offset!r}")
    # A score in a tensor with integer boxes would be cut to a whole number.
    return boxes if boxes.is_floating_point() else boxes.float(), scores, is_numpy


def _overlaps_with(box: Tensor, boxes: Tensor, offset: int) -> Tensor:
    """Return the IoU of one box [4] with each of boxes [N, 4]. Widths are x2 - x1 + offset."""
    sides = (torch.minimum(box[2:], boxes[:, 2:]) - torch.maximum(box[:2], boxes[:, :2]) + offset).clamp(
        min=0
    )
    intersection = sides[:, 0] * sides[:, 1]
    areas = (boxes[:, 2] - boxes[:, 0] + offset) * (boxes[:, 3] - boxes[:, 1] + offset)
    area = (box[2] - box[0] + offset) * (box[3] - box[1] + offset)
    return intersection / (area + areas - intersection)


def _fake_soft_nms(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return boxes.new_empty(count, 5), boxes.new_empty(count, dtype=torch.int64)


if _library.declares("soft_nms"):
    torch.library.register_fake("visdet::soft_nms", _fake_soft_nms)
