"""Functions on polylines, such as resampling, and clipping to a rectangle around the origin."""

from collections.abc import Sequence

import numpy as np

REGION_M = (30.0, 60.0)  # the width (x) and length (y) of the map around the vehicle in the configs
_MIN_LENGTH_M = 0.5
_MIN_AREA_M2 = 1.0
_SAME_POINT_M = 1e-3
_SIDES = ((0, 1), (0, -1), (1, 1), (1, -1))  # axis and direction of each side of a rectangle


def resample(line: np.ndarray, num_points: int) -> np.ndarray:
    """Return ``num_points`` points that are evenly spaced by length along a polyline [n, d], including its ends.

    If the line has no length, the result is its first point ``num_points`` times.
    """
    line = np.asarray(line, dtype=np.float64)
    steps = _step_lengths(line)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    wanted = np.linspace(0, along[-1], num_points)
    return np.stack([np.interp(wanted, along, column) for column in line.T], axis=1)


def _step_lengths(line: np.ndarray) -> np.ndarray:
    """Return the distances [n - 1] between the points of a polyline [n, d] that follow each other."""
    return np.linalg.norm(np.diff(line, axis=0), axis=1)


def _reach(points: np.ndarray, roi_size: Sequence[float] | np.ndarray, axis: int, sign: int) -> np.ndarray:
    """Return how far points [n, d] are inside of a side of the rectangle, [n]; see :func:`clip_line`."""
    return roi_size[axis] / 2 - sign * points[:, axis]


def clip_line(line: np.ndarray, roi_size: Sequence[float] | np.ndarray) -> list[np.ndarray]:
    """Return the parts of a polyline [n, d] within the rectangle |x| <= roi_size[0] / 2, |y| <= roi_size[1] / 2.

    Parts shorter than 0.5 m are dropped.
    """
    parts = [np.asarray(line, dtype=np.float64)]
    for axis, sign in _SIDES:
        inside: list[np.ndarray] = []
        for part in parts:
            inside += parts_inside(part, _reach(part, roi_size, axis, sign))
        parts = inside
    return [part for part in parts if _step_lengths(part).sum() >= _MIN_LENGTH_M]


def clip_polygon(polygon: np.ndarray, roi_size: Sequence[float] | np.ndarray) -> np.ndarray | None:
    """Return the part of a convex polygon [n, d] within the rectangle, as a closed outline [m, d].

    The last point of the outline equals the first. The result is ``None`` if less than 1 m² is inside.
    """
    outline = np.asarray(polygon, dtype=np.float64)
    for axis, sign in _SIDES:
        outline = polygon_inside(outline, _reach(outline, roi_size, axis, sign))
    is_large = polygon_area(outline) >= _MIN_AREA_M2
    return np.concatenate([outline, outline[:1]]) if is_large else None


def polygon_area(polygon: np.ndarray) -> float:
    """Return the area of a polygon [n, >= 2] in x and y."""
    x, y = polygon[:, :2].T
    return 0.5 * abs(float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1))))


def polygon_inside(polygon: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """Return the part [m, d] of a convex polygon [n, d] on one side of a line or a plane; see :func:`parts_inside`."""
    parts = parts_inside(np.concatenate([polygon, polygon[:1]]), np.append(reach, reach[:1]))
    points = np.concatenate([polygon[:0], *parts])
    # A polygon that begins inside ends with the point with which it begins.
    return points[:-1] if (reach[:1] >= 0).any() else points


def parts_inside(line: np.ndarray, reach: np.ndarray) -> list[np.ndarray]:
    """Return the parts of a polyline [n, d] on one side of a straight line or a plane.

    Args:
        line: the points. reach: [n], how far each is on that side, which is negative on the other one.
    """
    part: list[np.ndarray] = []
    parts = [part]
    before, last = 0.0, line[:1]
    for point, here in zip(line, reach, strict=True):
        if before * here < 0:
            share = before / (before - here)
            part.append(last + (point - last) * share)
        if here >= 0:
            part.append(point)
        elif part:
            part = []
            parts.append(part)
        before, last = here, point
    return [np.array(part) for part in parts if part]


def cut_to_region(
    line: np.ndarray, is_area: bool, roi_size: Sequence[float] | np.ndarray = REGION_M
) -> list[np.ndarray]:
    """Return the parts of a map line [n, d] within the rectangle: the line itself if it does not leave it by 1 mm.

    A single point, which is what a map's border has left of a line, has no part.

    Args:
        line: the points in metres.
        is_area: the line is the outline of a convex area if it is closed. What is left of that is closed, too.
        roi_size: see :func:`clip_line`.
    """
    if len(line) < 2:
        return []
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
    number = len(ring)
    places = (np.arange(number + 1) - np.arange(number)[:, None]) % number
    return np.concatenate([ring[places], ring[::-1][places]])
