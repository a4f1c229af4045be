"""Sizes and tables of levels for the problems of multi-scale deformable attention."""

from typing import Any

import torch
from torch import Tensor

from tests.fuzz.problem import Draw
from tests.fuzz.sampling import longest_side, starts_of

__all__ = ["attention_sizes", "error_factor", "level_tables"]


HEAD_CHANNELS = (1, 2, 3, 4, 6, 8, 16, 24, 30, 32, 33, 48, 64, 71, 128)


def _pyramid(draw: Draw, big: bool) -> Tensor:
    """Return level_shapes [L, 2]."""
    if not big:
        L = draw.size(5)
        return torch.tensor([[draw.size(12, 0), draw.size(12, 0)] for _ in range(L)]).reshape(L, 2)
    side = draw.pick(20, 33, 48, 64, 80) if draw.device == "cuda" else draw.pick(12, 20, 24)
    H, W = side, side + draw.size(20, 0)
    levels = [[max(H >> level, 1), max(W >> level, 1)] for level in range(draw.pick(4, 4, 4, 3, 1))]
    return torch.tensor(levels)


def level_tables(draw: Draw, shapes: Tensor) -> tuple[Any, Any, Tensor]:
    """Return level_shapes and level_starts in one of the forms that a caller may give, and the starts."""
    starts, _ = starts_of(shapes)
    given_starts = None if draw.chance(0.2) else draw.table(starts)
    return draw.table(shapes), given_starts, starts


def attention_sizes(draw: Draw) -> tuple[Tensor, int, int, int, int, int]:
    """Return level_shapes, B, Q, G, C and P, small and odd or as in a decoder or an encoder."""
    is_big = draw.is_big
    shapes = _pyramid(draw, is_big)
    rows = int(shapes.prod(1).sum())
    if is_big:
        G, C, P = draw.pick(8, 8, 4, 1), draw.pick(32, 32, 16, 64, 8), draw.pick(4, 4, 4, 3, 8)
        Q = draw.pick(rows, rows, 300, 900, 301) if rows <= 4000 or draw.device == "cuda" else 300
        return shapes, draw.pick(1, 2), Q, G, C, P
    G = draw.size(9)
    C = draw.pick(*HEAD_CHANNELS) if draw.chance(0.9) else draw.pick(0, 256, 257, 1025)
    if G * C > 600:
        G = 1
    Q = rows if draw.chance(0.1) else draw.size(24)
    return shapes, draw.size(3), Q, G, C, draw.size(6)


def error_factor(shapes: Tensor, samples: int) -> float:
    return 64.0 + 16 * longest_side(shapes) + 0.5 * samples
