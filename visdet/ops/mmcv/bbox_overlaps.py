"""Overlaps of axis-aligned boxes."""

from torch import Tensor

from .._arguments import check_that, empty_sum, floating, widened
from .._declared import declared
from ..nms import areas_of

__all__ = ["bbox_overlaps"]


@declared(bboxes1="real", bboxes2="real", mode="one of 'iou', 'iof'", offset="one of 0, 1")
def bbox_overlaps(
    bboxes1: Tensor,  # [M, 4] (x1, y1, x2, y2)
    bboxes2: Tensor,  # [N, 4]
    mode: str = "iou",
    aligned: bool = False,
    offset: int = 0,
) -> Tensor:  # [M, N], or [M] if aligned
    """Return the overlap of each box of ``bboxes1`` with each of ``bboxes2``, or pair by pair.

    Args:
        bboxes1: [M, 4]. Boxes (x1, y1, x2, y2), in any unit. A tensor of no boxes may have any last dimension.
        bboxes2: [N, 4]. Boxes of the same kind.
        mode: 'iou' divides the intersection by the union, 'iof' by the area of the box of ``bboxes1``.
        aligned: Whether each row is compared with the same row only. M must then equal N.
        offset: 0, or 1 if widths and heights are x2 - x1 + 1.

    Returns:
        [M, N], or [M] if aligned. The overlaps in the type of ``bboxes1``, or in float32 for integers. 16-bit types are
        computed in float32. With offset 0, the overlap of two boxes without area is NaN (0 / 0). The overlap of a box
        with a NaN corner is NaN.

    It is differentiable, and deterministic.

    Raises:
        ValueError: A shape, ``mode`` or ``offset`` does not fit.

    Source: The signature is mmcv's.
    """
    for name, boxes in (("bboxes1", bboxes1), ("bboxes2", bboxes2)):
        are_boxes = boxes.dim() > 0 and (boxes.shape[0] == 0 or boxes.shape[1:] == (4,))
        check_that(are_boxes, "bbox_overlaps", name, "be [N, 4]", boxes)
    M, N = bboxes1.shape[0], bboxes2.shape[0]
    expected = "be [{}, 4] as bboxes1 where aligned"
    check_that(not aligned or M == N, "bbox_overlaps", "bboxes2", expected, bboxes2, M)
    bboxes1 = floating(bboxes1)
    if M * N == 0:
        nothing = empty_sum(bboxes1, bboxes2).to(bboxes1)
        return bboxes1.new_zeros(M if aligned else (M, N)) + nothing
    first, second = widened(bboxes1, bboxes1), widened(bboxes2, bboxes1)
    if not aligned:
        first = first[:, None]
    shared, whole, others = areas_of(first, second, offset)
    if mode == "iou":
        whole = whole + others - shared
    return (shared / whole.clamp(min=offset)).to(bboxes1)
