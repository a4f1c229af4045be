"""Functions on polylines, such as resampling, and clipping to a rectangle around the origin."""

from collections.abc import Sequence

import numpy as np

REGION_M = (30.0, 60.0)  # the width (x) and length (y) of the map around the vehicle in the configs
_MIN_LENGTH_M = 0.5
_MIN_AREA_M2 = 1.0
_SAME_POINT_M = 1e-3


def resample(line: np.ndarray, num_points: int) -> np.ndarray:
    """Return ``num_points`` points that are evenly spaced by length along a polyline [n, d], including its ends.

    If the line has no length, the result is its first point ``num_points`` times.
    """
    line = np.asarray(line, dtype=np.float64)
    steps = np.linalg.norm(np.diff(line, axis=0), axis=1)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    wanted = np.linspace(0, along[-1], num_points)
    return np.stack([np.interp(wanted, along, line[:, axis]) for axis in range(line.shape[1])], axis=1)


def clip_line(line: np.ndarray, roi_size: Sequence[float] | np.ndarray) -> list[np.ndarray]:
    """Return the parts of a polyline [n, d] within the rectangle |x| <= roi_size[0] / 2, |y| <= roi_size[1] / 2.

    Parts shorter than 0.5 m are dropped.
    """
    half = np.asarray(roi_size, dtype=np.float64) / 2
    line = np.asarray(line, dtype=np.float64)
    start, delta = line[:-1], np.diff(line, axis=0)
    # Each segment start + t * delta is inside for entry <= t <= leave.
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds = np.stack([(-half - start[:, :2]) / delta[:, :2], (half - start[:, :2]) / delta[:, :2]])
    parallel = delta[:, :2] == 0
    inside = np.abs(start[:, :2]) <= half
    low = np.where(parallel, np.where(inside, -np.inf, np.inf), bounds.min(axis=0))
    high = np.where(parallel, np.where(inside, np.inf, -np.inf), bounds.max(axis=0))
    entry, leave = np.maximum(low.max(axis=1), 0), np.minimum(high.min(axis=1), 1)
    parts: list[list[np.ndarray]] = []
    is_open = False
    for segment in range(len(delta)):
        if entry[segment] >= leave[segment]:
            is_open = False
            continue
        if not is_open or entry[segment] > 0:
            parts.append([start[segment] + entry[segment] * delta[segment]])
        parts[-1].append(start[segment] + leave[segment] * delta[segment])
        is_open = leave[segment] == 1
    lines = [np.array(part) for part in parts]
    return [part for part in lines if np.linalg.norm(np.diff(part, axis=0), axis=1).sum() >= _MIN_LENGTH_M]


def clip_polygon(polygon: np.ndarray, roi_size: Sequence[float] | np.ndarray) -> np.ndarray | None:
    """Return the part of a convex polygon [n, d] within the rectangle, as a closed outline [m, d].

    The last point of the outline equals the first. The result is ``None`` if less than 1 m² is inside.
    """
    half = np.asarray(roi_size, dtype=np.float64) / 2
    points = np.asarray(polygon, dtype=np.float64)
    for axis, sign in ((0, 1), (0, -1), (1, 1), (1, -1)):
        reach = half[axis] - sign * points[:, axis]  # positive inside
        after, reach_after = np.roll(points, -1, axis=0), np.roll(reach, -1)
        kept = []
        for point, to, inside, inside_after in zip(points, after, reach, reach_after, strict=True):
            if inside >= 0:
                kept.append(point)
            if (inside >= 0) != (inside_after >= 0):
                kept.append(point + (to - point) * inside / (inside - inside_after))
        if len(kept) < 3:
            return None
        points = np.array(kept)
    x, y = points[:, :2].T
    area = abs(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2
    return np.concatenate([points, points[:1]]) if area >= _MIN_AREA_M2 else None


def cut_to_region(
    line: np.ndarray, is_area: bool, roi_size: Sequence[float] | np.ndarray = REGION_M
) -> list[np.ndarray]:
    """Return the parts of a map line [n, d] within the rectangle: the line itself if it does not leave it by 1 mm.

    Args:
        line: the points in metres.
        is_area: the line is the outline of a convex area if it is closed. What is left of that is closed, too.
        roi_size: see :func:`clip_line`.
    """
    if (np.abs(line[:, :2]) <= np.asarray(roi_size) / 2 + _SAME_POINT_M).all():
        return [line]
    if is_area and is_closed(line):
        part = clip_polygon(line[:-1], roi_size)
        return [] if part is None else [part]
    return clip_line(line, roi_size)


def is_closed(line: np.ndarray) -> bool:
    """Return whether the ends of a polyline [n, d] are equal within 1 mm."""
    return np.allclose(line[0], line[-1], atol=_SAME_POINT_M)


def simplify_line(line: np.ndarray, tolerance: float) -> np.ndarray:
    """Return a polyline [m, d] of some points of ``line`` [n, d] that passes within ``tolerance`` of the others.

    The ends of the line are kept.

    Source: the algorithm of Douglas and Peucker.
    """
    keep = np.zeros(len(line), dtype=bool)
    keep[[0, -1]] = True
    spans = [(0, len(line) - 1)]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        inner, chord = line[first + 1 : last] - line[first], line[last] - line[first]
        along = np.clip(inner @ chord / max(chord @ chord, 1e-12), 0, 1)
        distance = np.linalg.norm(inner - along[:, None] * chord, axis=1)
        worst = int(distance.argmax())
        if distance[worst] > tolerance:
            middle = first + 1 + worst
            keep[middle] = True
            spans += [(first, middle), (middle, last)]
    return line[keep]


def open_orders(line: np.ndarray, padding: float = 1e5) -> np.ndarray:
    """Return both orders of an open line [n, d], filled up with ``padding`` to [2 * (n - 1), n, d]."""
    orders = np.full((2 * (len(line) - 1), *line.shape), padding)
    orders[0], orders[1] = line, line[::-1]
    return orders


def closed_orders(line: np.ndarray) -> np.ndarray:
    """Return all orders of a closed line [n, d], whose last point equals the first, as [2 * (n - 1), n, d].

    The orders start from every point and run in both directions.
    """
    ring = line[:-1]
    starts = (np.arange(len(ring)) - np.arange(len(ring))[:, None]) % len(ring)
    rings = np.concatenate([ring[starts], ring[::-1][starts]])
    return np.concatenate([rings, rings[:, :1]], axis=1)
