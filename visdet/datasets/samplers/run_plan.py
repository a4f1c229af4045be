"""What is known of all batches of a run before any of them is read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from visdet.structures.planned_batch import BatchPlan, Size, holds, largest, union

from .batch_sizes import choose_sizes
from .planned_images import PlannedImage, PlannedImages

_NUM_READ = 64  # images that are read if the transforms do not say all sizes
_BOX_STEP = 16
_FEW_BOXES = 64  # padding to which costs nothing that can be measured
_MOST_IMAGES = 0.99  # of all images have no more boxes than the first number


@dataclass(frozen=True)
class RunPlan:
    """What is known of all batches of a run.

    Attributes:
        groups: the (height, width) by which images are put together, smallest area first.
        batches: the sizes and the numbers of boxes to which batches are padded.
        is_known: whether images have the sizes that the transforms say, so that batches are padded to ``groups``.
    """

    groups: tuple[Size, ...]
    batches: BatchPlan
    is_known: bool


def plan_of(images: PlannedImages, max_sizes: int) -> RunPlan:
    """Return the plan of a run.

    If a transform does not say what it does to the size, some images are read. If they have other sizes than planned,
    batches are still put together by the planned sizes, but padded to sizes that were seen.

    Args:
        images: the images of the data set. max_sizes: the greatest number of sizes of batches.
    """
    drawn = images.drawn()
    boxes = _box_numbers(images.num_boxes)
    if not drawn:
        return RunPlan((), BatchPlan(None, (), boxes=boxes), is_known=True)
    planned = [image.size for image in drawn]
    is_said = all(image.is_said for image in drawn)
    are_all = is_said and _are_fixed(images, drawn)
    groups = choose_sizes(planned, max_sizes, are_all)
    if not is_said:
        seen = images.read_sizes(drawn[:_NUM_READ])
        if seen != planned[:_NUM_READ]:
            sizes = choose_sizes([*seen, *_joined(planned, seen, groups)], max_sizes)
            return RunPlan(groups, BatchPlan(None, sizes, boxes=boxes), is_known=False)
    # No image is padded if each size of an image is one of a batch.
    filled = frozenset(groups if are_all and set(planned) == set(groups) else ())
    return RunPlan(groups, BatchPlan(None, groups, filled, boxes), is_known=True)


def _are_fixed(images: PlannedImages, drawn: Sequence[PlannedImage]) -> bool:
    """Return whether files of one size always become images of one size, so that no other sizes will come."""
    pairs = {(images.file_sizes[image.item], image.size) for image in drawn}
    return len(pairs) == len({file_size for file_size, _ in pairs})


def _joined(planned: Sequence[Size], seen: Sequence[Size], groups: tuple[Size, ...]) -> list[Size]:
    """Return the sizes that batches of the images that were read may need.

    A batch may hold any two images that are planned to fit into one of the largest sizes.
    """
    joined = []
    for top in largest(groups):
        members = [size for plan, size in zip(planned, seen, strict=False) if holds(top, plan)]
        if members:
            joined.append(union(members))
    return joined


def _box_numbers(num_boxes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers to which the boxes of an image are padded: one, or two if few images have many."""
    most, usual = (
        -(-max(int(np.quantile(num_boxes or [0], share)), 1) // _BOX_STEP) * _BOX_STEP
        for share in (1, _MOST_IMAGES)
    )
    usual = max(usual, _FEW_BOXES)
    return (most,) if most < 2 * usual else (usual, most)
