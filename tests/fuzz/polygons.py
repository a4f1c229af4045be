"""Polygons of complex numbers, and derivatives by differences, for references that share no code with the operators."""

import cmath
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "IS_NAN",
    "Points",
    "area",
    "by_differences",
    "cross",
    "crosses_itself",
    "derivatives",
    "hull",
    "points_of",
    "rectangle",
    "shared",
    "sides",
    "touches",
]

Points = list[complex]
IS_NAN = 7.0  # what stands for a NaN that is promised, because other NaN of a reference is not compared
STEP = 1e-6  # of the differences
KINK = 1e-4  # Derivatives of both sides that differ by more, of the largest one or of 1, are those of a kink.


def points_of(numbers: Sequence[float]) -> Points:
    """Return the points (x, y) of x1, y1, x2, y2, and so on."""
    return [complex(x, y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]


def rectangle(x: float, y: float, w: float, h: float, angle: float) -> Points:
    """Return the corners of a rotated box. A negative side counts as 0."""
    corner = complex(max(w, 0), max(h, 0)) / 2
    other = corner.conjugate()
    return [complex(x, y) + one * cmath.rect(1, angle) for one in (-corner, other, corner, -other)]


def sides(polygon: Points) -> Iterator[tuple[complex, complex]]:
    return zip(polygon, polygon[1:] + polygon[:1], strict=True)


def cross(o: complex, a: complex, b: complex) -> float:
    return ((a - o).conjugate() * (b - o)).imag


def hull(points: Points) -> Points:
    """Return the convex hull by the monotone chain, from x towards y."""
    chain: Points = []
    points = sorted(set(points), key=lambda point: (point.real, point.imag))
    for part in (points, points[::-1]):
        side: Points = []
        for point in part:
            while len(side) > 1 and cross(side[-2], side[-1], point) <= 0:
                side.pop()
            side.append(point)
        chain += side[:-1]
    return chain or points


def area(polygon: Points) -> float:
    """Return the area, negative if the polygon turns from y towards x."""
    return sum(cross(polygon[0], a, b) for a, b in sides(polygon)) / 2


def shared(polygon: Points, convex: Points) -> float:
    """Return the area of a polygon cut by the sides of a convex one."""
    convex = convex if area(convex) > 0 else convex[::-1]
    if area(convex) == 0:
        return 0.0
    for a, b in sides(convex):
        cut: Points = []
        for p, q in sides(polygon):
            sp, sq = cross(a, b, p), cross(a, b, q)
            if sp >= 0:
                cut.append(p)
            if (sp > 0 > sq) or (sp < 0 < sq):
                cut.append(p + sp / (sp - sq) * (q - p))
        polygon = cut
        if not polygon:
            return 0.0
    return abs(area(polygon))


def crosses_itself(corners: Points) -> bool:
    """Return whether two opposite sides of a quadrilateral cross."""
    a, b, c, d = corners
    pairs = ((a, b, c, d), (b, c, d, a))
    return any(
        cross(p, q, r) * cross(p, q, s) < 0 and cross(r, s, p) * cross(r, s, q) < 0 for p, q, r, s in pairs
    )


def touches(points: Points, polygon: Points) -> bool:
    """Return whether a corner of the points' hull is there twice, or one of it or the polygon on the other's sides."""
    one = hull(points)
    if any(points.count(corner) > 1 for corner in one):
        return True
    for corners, others in ((one, polygon), (polygon, one)):
        for a, b in sides(corners):
            length = abs(b - a)
            if any(abs(p - a) + abs(b - p) < length + 1e-9 * (1 + length) for p in others):
                return True
    return False


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., float], *tables: Tensor) -> Tensor:
        ctx.function, ctx.tables = function, [table.detach() for table in tables]
        rows = zip(*(table.flatten(0, -2).tolist() for table in tables), strict=True)
        return tables[0].new_tensor([function(*row) for row in rows]).view(tables[0].shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *(grad[..., None] * derivative for derivative in derivatives(ctx.function, *ctx.tables))


def by_differences(function: Callable[..., float], *tables: Tensor) -> Tensor:
    """Return a function of rows, with derivatives by differences. They are NaN at kinks."""
    return _Rows.apply(function, *tables)


def derivatives(function: Callable[..., float], *tables: Tensor) -> list[Tensor]:
    """Return the derivatives of a function of rows by their numbers, NaN at kinks and where it is ``IS_NAN``."""
    found = [torch.zeros_like(table, memory_format=torch.contiguous_format) for table in tables]
    flat = [one.view(-1, one.shape[-1]) for one in found]
    rows = [table.flatten(0, -2).tolist() for table in tables]
    for n, row in enumerate(zip(*rows, strict=True)):
        middle = function(*row)
        for t, numbers in enumerate(row):
            for i, number in enumerate(numbers):
                step = STEP * max(1.0, abs(number))
                ends = []
                for end in (number - step, number + step):
                    others = [*numbers[:i], end, *numbers[i + 1 :]]
                    ends.append(function(*row[:t], others, *row[t + 1 :]))
                before, after = (middle - ends[0]) / step, (ends[1] - middle) / step
                is_kink = middle == IS_NAN or not abs(after - before) < KINK * max(
                    1.0, abs(after), abs(before)
                )
                flat[t][n, i] = math.nan if is_kink else (before + after) / 2
    return found
