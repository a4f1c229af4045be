"""Non-maximum suppression per class, with the kind of suppression named by a configuration."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .nms import nms, soft_nms
from .tracing import is_traced

__all__ = ["batched_nms", "register_nms"]

_KINDS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"nms": nms, "soft_nms": soft_nms}


def register_nms(name: str, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Let ``batched_nms`` find ``function(boxes, scores, **cfg) -> (dets, keep)`` under ``type=name``.

    Raises:
        KeyError: the name is taken by another function.
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
    """Return the boxes moved so far that those of different classes cannot overlap."""
    if boxes.numel() == 0:
        return boxes
    known = boxes.nan_to_num(0, 0, 0)  # a box that is no number must not move the others
    if boxes.shape[-1] == 5:  # rotated: only centres move
        reach = known[:, :2].max() + known[:, 2:4].max() + 1
        return torch.cat([boxes[:, :2] + (idxs.to(boxes) * reach)[:, None], boxes[:, 2:]], 1)
    return boxes + (idxs.to(boxes) * (known.max() + 1))[:, None]


def batched_nms(
    boxes: Tensor,  # [N, 4] (x1, y1, x2, y2), or [N, 5] (x, y, w, h, angle)
    scores: Tensor,  # [N]
    idxs: Tensor,  # [N] class of each box
    nms_cfg: dict | None,
    class_agnostic: bool = False,
) -> tuple[Tensor, Tensor]:  # [M, 5] or [M, 6] boxes and scores, [M] int64
    """Return what suppression within each class leaves, best score first, and the indices into ``boxes``.

    Args:
        nms_cfg: ``type`` ('nms', 'soft_nms', a name given to ``register_nms`` or a function; 'nms' if absent) and that
            function's arguments, usually ``iou_threshold``. ``class_agnostic`` in it overrides the argument.
            ``split_thr`` (10000): from so many boxes on, classes are handled one after another; ``max_num`` (-1: all)
            cuts the merged result, whatever the type. None sorts only.
        class_agnostic: boxes of all classes suppress each other; from ``split_thr`` boxes on only those of their own
            class, as in mmcv: give a larger ``split_thr`` where that matters.

    16-bit boxes are shifted apart in float32: 80 classes times 1333 pixels are beyond float16 and between whole pixels
    in bfloat16. Boxes are shifted where classes are split too, as in mmcv: overlaps round alike. The result has the
    boxes as given and the scores the suppression made of them. A box with a NaN or infinite corner does not suppress
    others, nor do they suppress it, and it does not change how others are shifted.

    Raises:
        KeyError: ``type`` is unknown.
        ValueError: a shape does not fit.

    Source: mmcv's semantics; the trick of shifting classes apart is torchvision's.
    """
    if boxes.dim() != 2 or boxes.shape[1] not in (4, 5):
        raise ValueError(f"batched_nms: boxes must be [N, 4] or [N, 5], got {list(boxes.shape)}")
    for name, given in (("scores", scores), ("idxs", idxs)):
        if not is_traced() and given.shape != boxes.shape[:1]:  # numbers of a trace may be unknown
            raise ValueError(f"batched_nms: {name} must be [{boxes.shape[0]}], got {list(given.shape)}")
    if nms_cfg is None:
        ordered, keep = scores.sort(descending=True, stable=True)
        return torch.cat([boxes[keep], ordered[:, None]], -1), keep
    arguments = dict(nms_cfg)
    class_agnostic = arguments.pop("class_agnostic", class_agnostic)
    suppress = _kind(arguments.pop("type", "nms"))
    split_threshold, max_num = arguments.pop("split_thr", 10000), arguments.pop("max_num", -1)
    wide = boxes if boxes.dtype in (torch.float32, torch.float64) else boxes.float()
    apart = wide if class_agnostic else _shifted_apart(wide, idxs)
    if boxes.shape[0] < max(split_threshold, 1):  # len() would fix the number in an exported program
        detections, keep = suppress(apart, scores.to(wide), **arguments)
        kept_scores, kept = detections[:, -1], keep
    else:
        kept_scores, kept = _class_by_class(apart, scores.to(wide), idxs, suppress, arguments)
    if max_num > 0:
        kept, kept_scores = kept[:max_num], kept_scores[:max_num]
    return torch.cat([boxes[kept], kept_scores[:, None].to(boxes)], -1), kept


def _class_by_class(
    boxes: Tensor, scores: Tensor, idxs: Tensor, suppress: Callable, arguments: dict
) -> tuple[Tensor, Tensor]:
    """Return (scores, indices) of what is left of all classes, best first."""
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
