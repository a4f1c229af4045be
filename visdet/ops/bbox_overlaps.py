"""Overlaps of axis-aligned boxes."""

import torch
from torch import Tensor

__all__ = ["bbox_overlaps"]


def bbox_overlaps(
    bboxes1: Tensor,  # [M, 4] (x1, y1, x2, y2)
    bboxes2: Tensor,  # [N, 4]
    mode: str = "iou",
    aligned: bool = False,
    offset: int = 0,
) -> Tensor:  # [M, N], or [M] if aligned
    """Return the overlap of each box of ``bboxes1`` with each of ``bboxes2``, or pair by pair.

    Args:
        mode: 'iou', intersection over union, or 'iof', over the area of the box of ``bboxes1``.
        aligned: compare row with row; M = N.
        offset: 0, or 1: widths and heights are x2 - x1 + 1.

    Two boxes without area have overlap NaN (0 / 0) at offset 0, and so have boxes with a NaN corner. 16-bit types are
    computed in float32, and so are integers, whose overlaps are float32.
    Differentiable. A tensor of no boxes may have any last dimension.

    Raises:
        ValueError: a shape, ``mode`` or ``offset`` does not fit.

    Source: signature is mmcv's.
    """
    if mode not in ("iou", "iof"):
        raise ValueError(f"bbox_overlaps: mode must be 'iou' or 'iof', got {mode!r}")
    if offset not in (0, 1):
        raise ValueError(f"bbox_overlaps: offset must be 0 or 1, got {offset!r}")
    for name, boxes in (("bboxes1", bboxes1), ("bboxes2", bboxes2)):
        if boxes.dim() == 0 or (len(boxes) and (boxes.dim() != 2 or boxes.shape[1] != 4)):
            raise ValueError(f"bbox_overlaps: {name} must be [N, 4], got {list(boxes.shape)}")
    M, N = len(bboxes1), len(bboxes2)
    if aligned and M != N:
        raise ValueError(f"bbox_overlaps: aligned boxes must be as many, got {M} and {N}")
    given = bboxes1.dtype if bboxes1.is_floating_point() else torch.float32
    if M * N == 0:
        return bboxes1.new_zeros(M if aligned else (M, N), dtype=given)
    dtype = given if given == torch.float64 else torch.float32
    first, second = bboxes1.to(dtype), bboxes2.to(dtype)
    if not aligned:
        first = first[:, None]
    sides = (
        torch.minimum(first[..., 2:], second[..., 2:])
        - torch.maximum(first[..., :2], second[..., :2])
        + offset
    )
    intersection = sides.clamp(min=0).prod(-1)
    whole = (first[..., 2:] - first[..., :2] + offset).prod(-1)
    if mode == "iou":
        whole = whole + (second[..., 2:] - second[..., :2] + offset).prod(-1) - intersection
    return (intersection / whole.clamp(min=offset)).to(given)
