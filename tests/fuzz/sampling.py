"""Bilinear samples with RoIAlign's border, for references that share no code with the operators; tables of levels."""

import torch
from torch import Tensor

__all__ = ["CLEAR", "NEAR", "is_unclear", "longest_side", "near_whole", "sampled", "starts_of"]

CLEAR = 1e-3  # Rounding may move a sample that is so near to a border to the other side.
NEAR = 1e-3  # Rounding may put a position that is this near to a whole number of pixels on either side of it.


def sampled(maps: Tensor, y: Tensor, x: Tensor) -> Tensor:  # [C, H, W], [N], [N] -> [C, N]
    """Return samples by the hat function of each pixel. A sample beyond one pixel outside the map is 0."""
    H, W = maps.shape[1:]
    counts = (y >= -1) & (y <= H) & (x >= -1) & (x <= W)
    y, x = (torch.where(counts, p, 0.0).clamp(0, size - 1) for p, size in ((y, H), (x, W)))
    down, across = (
        (1 - (p[:, None] - torch.arange(size, device=p.device)).abs()).clamp(min=0)
        for p, size in ((y, H), (x, W))
    )
    weights = down[:, :, None] * across[:, None]  # [N, H, W]
    terms = torch.where(weights > 0, weights * maps[:, None], 0.0)
    return torch.where(counts, terms.sum((2, 3)), 0.0)


def is_unclear(y: Tensor, x: Tensor, H: int, W: int, near_bad_numbers: bool) -> Tensor:
    """Return whether rounding decides if a sample is inside the map, or if it reads a bad number."""
    unclear = torch.zeros_like(y, dtype=torch.bool)
    for places, size in ((y, H), (x, W)):
        unclear |= ((places + 1).abs() < CLEAR) | ((places - size).abs() < CLEAR)
        if near_bad_numbers:
            unclear |= (places - places.round()).abs() < CLEAR
    return unclear


def near_whole(locations: Tensor, sizes: Tensor) -> Tensor:
    """Return a mask, True where a coordinate of a position in pixels is near a whole number."""
    pixels = locations.double() * sizes - 0.5
    return (pixels - pixels.round()).abs() < NEAR * (1 + pixels.abs() * 1e-3)


def starts_of(shapes: Tensor) -> tuple[Tensor, int]:  # [..., 2] -> [...]
    """Return the first row of each map of a flattened pyramid without gaps, and the number of rows."""
    areas = shapes.prod(-1).flatten()
    return (areas.cumsum(0) - areas).view(shapes.shape[:-1]), int(areas.sum())


def longest_side(shapes: Tensor) -> int:
    """Return the largest height or width of the levels, which is 1 without levels."""
    return int(shapes.max()) if shapes.numel() else 1
