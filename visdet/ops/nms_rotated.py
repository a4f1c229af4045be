"""Non-maximum suppression of rotated boxes and of quadrilaterals."""

from torch import Tensor

from ._arguments import floating
from ._classes import check_classes
from ._declared import declared
from .box_iou_rotated import turned_back
from .nms import kept_indices, with_scores

__all__ = ["nms_quadri", "nms_rotated"]


@declared(dets="real [N, 5]", scores="real [N]", iou_threshold="number")
def nms_rotated(
    dets: Tensor,  # [N, 5] (x, y, w, h, angle)
    scores: Tensor,  # [N]
    iou_threshold: float,
    labels: Tensor | None = None,  # [N]
    clockwise: bool = True,
) -> tuple[Tensor, Tensor]:  # [M, 6] boxes and scores, [M] int64
    """Return the rotated boxes that no better one overlaps by more than ``iou_threshold``, and their indices.

    Args:
        dets: [N, 5] (x, y, w, h, angle), as of ``box_iou_rotated``. Integers are converted to float32.
        scores: [N]. The score of each box. Of equal scores the lower index comes first. NaN scores come first.
        iou_threshold: A box is suppressed if its IoU with a kept one is greater.
        labels: [N]. The class of each box, any numbers. Boxes of different classes do not suppress each other. The
            default is one class for all.
        clockwise: As of ``box_iou_rotated``.

    Returns:
        [M, 6] and [M]. The boxes with their scores, best first, and int64 indices. No boxes give an empty [0, 6] and
        empty indices, where mmcv returns None for the indices. A box with a NaN or infinite number suppresses no other
        and is kept.

    The result [M, 6] is differentiable with respect to boxes and scores, because it is a selection. The indices are
    not. It is deterministic. On a GPU, the host waits once, for the number of boxes.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    return _kept("nms_rotated", dets, scores, iou_threshold, labels, clockwise)


@declared(dets="real [N, 8]", scores="real [N]", iou_threshold="number")
def nms_quadri(
    dets: Tensor,  # [N, 8] (x1, y1, ..., x4, y4)
    scores: Tensor,  # [N]
    iou_threshold: float,
    labels: Tensor | None = None,  # [N]
) -> tuple[Tensor, Tensor]:  # [M, 9] boxes and scores, [M] int64
    """Return the quadrilaterals that no better one overlaps by more than ``iou_threshold``, and their indices.

    Args:
        dets: [N, 8] (x1, y1, ..., x4, y4), as of ``box_iou_quadri``. Integers are converted to float32.
        scores: [N]. As of ``nms_rotated``.
        iou_threshold: As of ``nms_rotated``.
        labels: [N]. As of ``nms_rotated``.

    Returns:
        [M, 9] and [M]. The boxes with their scores, and int64 indices, as from ``nms_rotated``.

    Differentiability and determinism are those of ``nms_rotated``.

    Raises:
        ValueError: A shape does not fit. The message names the argument.

    Source: The signature is mmcv's.
    """
    return _kept("nms_quadri", dets, scores, iou_threshold, labels)


def _kept(
    op: str,
    dets: Tensor,
    scores: Tensor,
    iou_threshold: float,
    labels: Tensor | None,
    clockwise: bool = True,
) -> tuple[Tensor, Tensor]:
    classes = check_classes(op, "labels", labels, dets)
    dets = floating(dets)
    keep = kept_indices(dets if clockwise else turned_back(dets), scores, iou_threshold, classes)
    return with_scores(dets, keep, scores[keep])
