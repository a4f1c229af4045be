"""The few sizes to which the images of a run are padded, and the batches of them at the end of an epoch."""

from collections.abc import Callable, Sequence
from itertools import combinations
from random import Random
from typing import TypeVar

import numpy as np

from visdet.structures.planned_batch import Size, first_for, holds, largest, union

_STEP_PX = 32  # Sizes of images are compared on a grid of this many pixels,
_MOST_STEPS = 64  # or of a coarser one, if there are larger images.
_ROUNDS = 3  # in which each size may be replaced by a better one
_HARDLY_MORE = 1.05  # times the pixels of the largest size
_MANY = 0.005  # of all images

T = TypeVar("T")


def area(size: Size) -> int:
    """Return the number of pixels of a (height, width)."""
    return size[0] * size[1]


def choose_sizes(images: Sequence[Size], max_sizes: int, are_all: bool = False) -> tuple[Size, ...]:
    """Return at most ``max_sizes`` (height, width) of batches, smallest area first, such that little is padded.

    Each image fits into at least one of them. First come those that hold the largest images; then, greedily, each that
    saves the most padded pixels. Then each of these is replaced if another saves more. There need not be a size that
    holds all images, because a batch for both the highest and the widest images would take more memory than any other.

    Args:
        images: the (height, width) of images, as often as they occur. max_sizes: the greatest number of sizes.
        are_all: whether no other sizes occur. Otherwise, the largest sizes leave some room.
    """
    exact = np.array(images)
    step = max(_STEP_PX, -(-int(exact.max()) // _MOST_STEPS))
    cells, cell_of_image, counts = np.unique(
        -(-exact // step), axis=0, return_inverse=True, return_counts=True
    )
    # The largest image of a cell stands for the cell, so that images of one size are not padded at all.
    corners = np.zeros_like(cells)
    np.maximum.at(corners, cell_of_image.reshape(-1), exact)
    tops = _largest([tuple(corner) for corner in corners.tolist()], max(max_sizes // 4, 1))
    if not are_all:
        tops = [(_rounded(h, exact[:, 0], step), _rounded(w, exact[:, 1], step)) for h, w in tops]
    candidates = np.concatenate([np.array(tops), corners])
    areas = candidates.prod(1)
    fits = (corners[None] <= candidates[:, None]).all(2)  # [candidate, cell]
    padded = np.where(fits, areas[:, None], np.inf)
    chosen = list(range(len(tops)))

    def add_best() -> bool:
        saved = (np.maximum(padded[chosen].min(0) - padded, 0) * counts).sum(1)
        chosen.append(int(saved.argmax()))
        return saved.max() > 0

    while len(chosen) < max_sizes and add_best():
        pass
    first = len(tops)
    for _ in range(_ROUNDS * (len(chosen) - first)):
        chosen.pop(first)  # the one that was chosen first
        add_best()
    sizes = {tuple(candidates[k].tolist()) for k in chosen}
    return tuple(sorted(sorted(sizes), key=area))


def _largest(sizes: Sequence[Size], most: int) -> list[Size]:
    """Return at most ``most`` sizes such that each of ``sizes`` fits into one of them.

    Sizes are joined if that takes hardly more pixels than the largest of them has.
    """
    found = largest(sizes)
    limit = _HARDLY_MORE * max(map(area, found))
    while len(found) > 1:
        both = _cheapest_union(found)
        if len(found) <= most and area(both) > limit:
            break
        found = [size for size in found if not holds(both, size)] + [both]
    return found


def _cheapest_union(sizes: Sequence[Size]) -> Size:
    """Return the union of those two sizes for which it has the fewest pixels beyond those of the larger one."""
    costs = []
    for one, other in combinations(sizes, 2):
        both = union([one, other])
        larger = max(area(one), area(other))
        costs.append((area(both) - larger, both, larger))
    return min(costs)[1]


def _rounded(side: int, sides: np.ndarray, step: int) -> int:
    """Return the greatest side of images, with some pixels more if others may yet be greater.

    A side that many images have is a limit that the pipeline sets.
    """
    return side if (sides == side).mean() > _MANY else -(-(side + step // 4) // step) * step


def last_batches(
    items: Sequence[T], size_of: Callable[[T], Size], sizes: Sequence[Size], number: int, rng: Random
) -> list[tuple[Size, list[T]]]:
    """Return batches of ``number`` items each, with their sizes. All items are in one, and only the last is incomplete.

    Images of one size or of the next go together, and the incomplete batch has one of the largest sizes. An image that
    fits into both the highest and the widest batches goes where it makes full ones. Only if there are not enough of
    these, the last batches have sizes of their own.

    Args:
        items: the images, each of which fits into one of ``sizes``. size_of: returns the (height, width) of one.
        sizes: the sizes of batches, smallest area first. number: items of a batch. rng: shuffles the batches.
    """

    def level_of(item: T) -> int:
        return sizes.index(first_for(size_of(item), sizes))

    def batch_of(members: list[T]) -> tuple[Size, list[T]]:
        needed = union(map(size_of, members))
        # The incomplete batch has one of the largest sizes, so that there are few shapes of such batches.
        planned = sizes if len(members) == number else tops
        return first_for(needed, planned) or needed, members

    tops = largest(sizes)
    groups, mixed = _groups(items, size_of, tops, number)
    batches = []
    for group in groups:
        ordered = sorted(group, key=level_of)
        full = len(ordered) // number * number
        mixed += ordered[full:]
        batches += [batch_of(ordered[start : start + number]) for start in range(0, full, number)]
    rng.shuffle(batches)
    return batches + [batch_of(mixed[start : start + number]) for start in range(0, len(mixed), number)]


def _groups(
    items: Sequence[T], size_of: Callable[[T], Size], tops: Sequence[Size], number: int
) -> tuple[list[list[T]], list[T]]:
    """Return the items that go into batches of at most each size of ``tops``, and those that are left over.

    All groups but the last have a multiple of ``number`` items.
    """

    def item_area(item: T) -> int:
        return area(size_of(item))

    def pair_area(pair: tuple[T, list[T]]) -> int:
        return item_area(pair[0])

    # An item is in the last group that may have it, so that items move from later groups to earlier ones alone.
    groups: list[list[T]] = [[] for _ in tops]
    for item in items:
        groups[max(k for k, top in enumerate(tops) if holds(top, size_of(item)))].append(item)
    left: list[T] = []
    for k, group in enumerate(groups[:-1]):
        lacking = -len(group) % number
        coming: list[tuple[T, list[T]]] = []
        for other in groups[k + 1 :]:
            coming += [(item, other) for item in other if holds(tops[k], size_of(item))]
        if len(coming) >= lacking:
            coming.sort(key=pair_area)
            for item, origin in coming[:lacking]:
                origin.remove(item)
                group.append(item)
        else:
            smallest = sorted(group, key=item_area)
            surplus = number - lacking
            left += smallest[:surplus]
            groups[k] = smallest[surplus:]
    return groups, left
