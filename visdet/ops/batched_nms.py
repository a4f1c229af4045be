"""Non-maximum suppression per class, of a kind that a config names."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .nms import nms, soft_nms
from .tracing import is_traced

__all__ = ["batched_nms", "register_nms"]

_KINDS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"nms": nms, "soft_nms": soft_nms}


def batched_nms(
    boxes: Tensor,  # [N, 4] (x1, y1, x2, y2), or [N, 5] (x, y, w, h, angle)
    scores: Tensor,  # [N]
    idxs: Tensor,  # [N] class of each box
    nms_cfg: dict | None,
    class_agnostic: bool = False,
) -> tuple[Tensor, Tensor]:  # [M, 5] or [M, 6] boxes and scores, [M] int64
    """Return the boxes that suppression within each class leaves, best score first, and their indices in ``boxes``.

    Args:
        boxes: [N, 4] or [N, 5]. Axis-aligned boxes (x1, y1, x2, y2), or rotated ones, in any unit. Integers are
            converted to float32.
        scores: [N]. The score of each box.
        idxs: [N]. The class of each box.
        nms_cfg: ``type``, which is 'nms' (the default), 'soft_nms', a name given to ``register_nms`` or a function, and
            the arguments of that function, usually ``iou_threshold``. Three more entries are read here.
            ``class_agnostic`` overrides the argument. From ``split_thr`` (10000) boxes on, classes are handled one
            after another. ``max_num`` (-1, for all) limits the number of boxes of the merged result, whatever the
            type. None instead of a dict sorts the boxes and suppresses none.
        class_agnostic: Whether boxes of all classes suppress each other. From ``split_thr`` boxes on only those of one
            class do, as in mmcv: give a larger ``split_thr`` where that matters.

    Returns:
        [M, 5] or [M, 6], and [M]. The boxes as they were given with the scores that the suppression made of them, and
        int64 indices.

    Boxes of different classes are moved so far apart that they do not overlap; where classes are handled one after
    another, too, as in mmcv, so that overlaps round alike. They are moved by the largest coordinate, as in mmcv, but
    where corners are negative, which mmcv does not keep apart, by the distance of the lowest to the largest one. 16-bit
    boxes are moved in float32, because 80 classes times 1333 pixels are beyond float16 and, in bfloat16, fall between
    whole pixels. A box with a NaN or infinite corner suppresses no other box, is suppressed by none, and does not
    change how far others are moved. Differentiability is that of the function that suppresses.

    Raises:
        KeyError: ``type`` is unknown.
        ValueError: A shape does not fit. The message names the argument.

    Source: The semantics are mmcv's; the trick of moving classes apart is torchvision's.
    """
    if boxes.dim() != 2 or boxes.shape[1] not in (4, 5):
        raise ValueError(f"batched_nms: boxes must be [N, 4] or [N, 5], got {list(boxes.shape)}")
    for name, given in (("scores", scores), ("idxs", idxs)):
        if not is_traced() and given.shape != boxes.shape[:1]:  # numbers of a trace may be unknown
            raise ValueError(f"batched_nms: {name} must be [{boxes.shape[0]}], got {list(given.shape)}")
    boxes = boxes if boxes.is_floating_point() else boxes.float()
    if nms_cfg is None:
        ordered, keep = scores.sort(descending=True, stable=True)
        return torch.cat([boxes[keep], ordered[:, None]], -1), keep
    arguments = dict(nms_cfg)
    class_agnostic = arguments.pop("class_agnostic", class_agnostic)
    suppress = _kind(arguments.pop("type", "nms"))
    split_threshold, max_num = arguments.pop("split_thr", 10000), arguments.pop("max_num", -1)
    converted = boxes if boxes.dtype in (torch.float32, torch.float64) else boxes.float()
    apart = converted if class_agnostic else _shifted_apart(converted, idxs)
    if boxes.shape[0] < max(split_threshold, 1):  # len() would fix the number in an exported program
        detections, keep = suppress(apart, scores.to(converted), **arguments)
        kept_scores, kept = detections[:, -1], keep
    else:
        kept_scores, kept = _class_by_class(apart, scores.to(converted), idxs, suppress, arguments)
    if max_num > 0:
        kept, kept_scores = kept[:max_num], kept_scores[:max_num]
    return torch.cat([boxes[kept], kept_scores[:, None].to(boxes)], -1), kept


def register_nms(name: str, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Let ``batched_nms`` find ``function(boxes, scores, **cfg) -> (dets, keep)`` under ``type=name``.

    Registering the same function again changes nothing.

    Raises:
        KeyError: Another function has the name already.
    """
    if _KINDS.setdefault(name, function) is not function:
        raise KeyError(f"register_nms: {name!r} is taken by {_KINDS[name]!r}")


def _kind(kind: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    if callable(kind):
        return kind
    if kind not in _KINDS:
        raise KeyError(f"batched_nms: type must be one of {sorted(_KINDS)} or a function, got {kind!r}")
    return _KINDS[kind]


def _shifted_apart(boxes: Tensor, idxs: Tensor) -> Tensor:
    """Return the boxes, moved so far that boxes of different classes cannot overlap."""
    if boxes.numel() == 0:
        return boxes
    # A box with a NaN or infinite corner must not change how far others are moved.
    known = boxes.nan_to_num(0, 0, 0)
    if boxes.shape[-1] == 5:  # Of rotated boxes, only the centres move.
        reach = _span(known[:, :2]) + known[:, 2:4].max() + 1
        return torch.cat([boxes[:, :2] + (idxs.to(boxes) * reach)[:, None], boxes[:, 2:]], 1)
    return boxes + (idxs.to(boxes) * (_span(known) + 1))[:, None]


def _span(coordinates: Tensor) -> Tensor:
    """Return the distance from the lowest of the coordinates, or from 0 where none is negative, to the highest."""
    return coordinates.max() - coordinates.min().clamp(max=0)


def _class_by_class(
    boxes: Tensor, scores: Tensor, idxs: Tensor, suppress: Callable, arguments: dict
) -> tuple[Tensor, Tensor]:
    """Return (scores, indices) of the boxes that each class keeps, best first."""
    by_class, members = idxs.sort(stable=True)
    counts = by_class.unique_consecutive(return_counts=True)[1].tolist()
    parts = (values.split(counts) for values in (members, boxes[members], scores[members]))
    results = [
        (members_of_one[keep], detections[:, -1])
        for members_of_one, *given in zip(*parts, strict=True)
        for detections, keep in [suppress(*given, **arguments)]
    ]
    kept, kept_scores = (torch.cat(part) for part in zip(*results, strict=True))
    lowest_first = kept.argsort()  # equal scores keep the order of the boxes
    kept, kept_scores = kept[lowest_first], kept_scores[lowest_first]
    kept_scores, order = kept_scores.sort(descending=True, stable=True)
    return kept_scores, kept[order]
