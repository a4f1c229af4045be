"""The form in which polylines are compared."""

from collections.abc import Sequence

import torch
from torch import Tensor

_EPS_M = 1e-5


def normalize_line(line: Tensor, num_sample: int, roi_size: Sequence[float]) -> Tensor:
    """Return polylines [..., num_sample · 2] in 0..1 of a region of ``roi_size`` metres.

    They are given in metres, and the origin is the centre of the region.
    """
    points = line.unflatten(-1, (num_sample, 2)).unbind(-1)
    normalized = [(x + size / 2) / (size + _EPS_M) for x, size in zip(points, roi_size, strict=True)]
    return torch.stack(normalized, dim=-1).flatten(-2)
