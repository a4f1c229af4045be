"""Non-maximum suppression per class, of a kind that a config names."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ._arguments import check_that, floating, widened
from ._classes import check_classes, class_by_class
from ._declared import declared
from .nms import nms, with_scores
from .nms_rotated import nms_quadri, nms_rotated
from .soft_nms import soft_nms
from .tracing import is_traced

__all__ = ["batched_nms", "register_nms"]

_KINDS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "nms": nms,
    "soft_nms": soft_nms,
    "nms_rotated": nms_rotated,
    "nms_quadri": nms_quadri,
}
# The argument for the classes of functions that have one.
_CLASSES_OF: dict[Callable[..., Any], str] = {
    nms: "classes",
    soft_nms: "classes",
    nms_rotated: "labels",
    nms_quadri: "labels",
}


@declared(boxes="real", scores="real", idxs="array or any")
def batched_nms(
    boxes: Tensor,  # [N, 4] (x1, y1, x2, y2), [N, 5] (x, y, w, h, angle) or [N, 8] four corners
    scores: Tensor,  # [N]
    idxs: Tensor,  # [N] class of each box
    nms_cfg: dict | None,
    class_agnostic: bool = False,
) -> tuple[Tensor, Tensor]:  # [M, 5], [M, 6] or [M, 9] boxes and scores, [M] int64
    """Return the boxes that suppression within each class leaves, best score first, and their indices in ``boxes``.

    Args:
        boxes: [N, 4], [N, 5] or [N, 8]. Axis-aligned boxes (x1, y1, x2, y2), rotated ones or quadrilaterals, in any
            unit, as the type of suppression takes them. Integers are converted to float32.
        scores: [N]. The score of each box.
        idxs: [N]. The class of each box.
        nms_cfg: ``type``, which is 'nms' (the default), 'soft_nms', 'nms_rotated', 'nms_quadri', a name given to
            ``register_nms`` or a function, and the arguments of that function, usually ``iou_threshold``. Three more
            entries are read here. ``class_agnostic`` overrides the argument, ``split_thr`` (10000) is the number of
            boxes from which on that is ignored, and ``max_num`` (-1, for all) limits the number of boxes of the merged
            result, whatever the type. None instead of a dict sorts the boxes and suppresses none.
        class_agnostic: Whether boxes of all classes suppress each other. From ``split_thr`` boxes on only those of one
            class do, as in mmcv: give a larger ``split_thr`` where that matters.

    Returns:
        [M, 5], [M, 6] or [M, 9], and [M]. The boxes as they were given with the scores that the suppression made of
        them, and int64 indices.

    The result is that of every class alone, at any number of classes and any coordinates: no box is moved. The four
    types named above handle all classes in one call. Another function is called once for each class. A box with a NaN
    or infinite corner suppresses no other box and is suppressed by none. Differentiability is that of the function that
    suppresses.

    Raises:
        KeyError: ``type`` is unknown.
        TypeError: ``nms_cfg`` is neither a dict nor None.
        ValueError: A shape does not fit. The message names the argument.

    Source: The semantics are mmcv's, which moves the classes apart, so that its overlaps are rounded.
    """
    shape = boxes.shape
    are_boxes = boxes.dim() == 2 and shape[1] in (4, 5, 8)
    check_that(are_boxes, "batched_nms", "boxes", "be [N, 4], [N, 5] or [N, 8]", boxes)
    for name, given in (("scores", scores), ("idxs", idxs)):
        fits = is_traced() or given.shape == shape[:1]  # numbers of a trace may be unknown
        check_that(fits, "batched_nms", name, "be [{}]", list(given.shape), shape[0])
    boxes = floating(boxes)
    if nms_cfg is None:
        ordered, keep = scores.sort(descending=True, stable=True)
        return with_scores(boxes, keep, ordered)
    if not isinstance(nms_cfg, dict):
        raise TypeError(
            f"batched_nms: nms_cfg must be a dict such as {{'iou_threshold': 0.5}}, got {nms_cfg!r}"
        )
    arguments = dict(nms_cfg)
    class_agnostic = arguments.pop("class_agnostic", class_agnostic)
    kind = arguments.pop("type", "nms")
    suppress = kind if callable(kind) else _KINDS.get(kind)
    if suppress is None:
        raise KeyError(f"batched_nms: type must be one of {sorted(_KINDS)} or a function, got {kind!r}")
    split_threshold, max_num = arguments.pop("split_thr", 10000), arguments.pop("max_num", -1)
    # In an exported program, len() would fix the number of boxes.
    is_joint = class_agnostic and shape[0] < max(split_threshold, 1)
    wide = widened(boxes, boxes)
    classes = check_classes("batched_nms", "idxs", None if is_joint else idxs, boxes)
    if classes is None:
        detections, kept = suppress(wide, scores, **arguments)
    elif suppress in _CLASSES_OF:
        detections, kept = suppress(wide, scores, **arguments, **{_CLASSES_OF[suppress]: classes})
    else:
        detections, kept = class_by_class(suppress, wide, scores, classes, **arguments)
    if max_num > 0:
        detections, kept = detections[:max_num], kept[:max_num]
    kept_scores = detections[:, -1]
    if boxes.dtype != wide.dtype:
        kept_scores = kept_scores.to(boxes)
    elif suppress in _CLASSES_OF:  # The detections hold the boxes as they were given.
        return detections, kept
    return with_scores(boxes, kept, kept_scores)


def register_nms(name: str, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Let ``batched_nms`` find ``function(boxes, scores, **cfg) -> (dets, keep)`` under ``type=name``.

    Registering the same function again changes nothing.

    Raises:
        KeyError: Another function has the name already.
    """
    if _KINDS.setdefault(name, function) is not function:
        raise KeyError(f"register_nms: {name!r} is taken by {_KINDS[name]!r}")
