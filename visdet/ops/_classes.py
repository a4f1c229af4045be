"""Boxes of several classes, of which only those of one class suppress each other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._arguments import as_tensor, check_device, check_numbers, check_tensor, check_that
from .tracing import is_traced

__all__ = ["check_classes", "class_by_class", "highest_first"]


def check_classes(op: str, name: str, classes: Any, boxes: Tensor) -> Tensor | None:
    """Return the class of each box, a tensor or a NumPy array, as int64 on the device of ``boxes``, or None for None.

    Equal classes are equal numbers afterwards, and different ones differ, those with a fraction, too.

    Raises:
        ValueError: the argument ``name`` does not have one real number for each box.
    """
    if classes is None:
        return None
    classes = as_tensor(classes) if hasattr(classes, "shape") else torch.as_tensor(classes)
    check_tensor(op, name, classes)
    check_numbers(op, name, classes, "mask")
    if classes.is_meta:
        check_device(op, name, classes, "boxes", boxes)
    fits = is_traced() or classes.shape == boxes.shape[:1]  # numbers of a trace may be unknown
    check_that(fits, op, name, "be [{}]", classes, boxes.shape[0])
    classes = classes.detach().to(boxes.device)
    if classes.is_floating_point():
        return (classes.double() + 0.0).view(torch.int64)  # -0 + 0 is 0
    return classes.long()


def highest_first(detections: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in descending order of the detections' last column, then in ascending order of ``keep``."""
    by_index = keep.argsort()
    order = by_index[detections[by_index, -1].sort(descending=True, stable=True).indices]
    return detections[order], keep[order]


def class_by_class(
    suppress: Callable[..., tuple[Tensor, Tensor]],
    boxes: Tensor,
    scores: Tensor,
    classes: Tensor,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:
    """Return the detections and the indices of ``suppress(boxes, scores, **arguments)`` of each class, best first."""
    by_class, members = classes.sort(stable=True)
    counts = by_class.unique_consecutive(return_counts=True)[1].tolist()
    if not counts:
        return suppress(boxes, scores, **arguments)
    results = []
    for of_class in members.split(counts):
        detections, keep = suppress(boxes[of_class], scores[of_class], **arguments)
        results.append((of_class[keep], detections))
    keep, detections = (torch.cat(parts) for parts in zip(*results, strict=True))
    return highest_first(detections, keep)
