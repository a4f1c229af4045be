"""The form in which polylines are compared."""

from torch import Tensor

from ...transfer import constants_on

_EPS_M = 1e-5


def normalize_line(line: Tensor, num_sample: int, roi_size: tuple[float, ...]) -> Tensor:
    """Return polylines [..., num_sample · 2] in 0..1 of a region of ``roi_size`` metres.

    They are given in metres, and the origin is the centre of the region.
    """
    size = constants_on(line.device, roi_size, line.dtype)
    points = line.unflatten(-1, (num_sample, 2))
    return ((points + size / 2) / (size + _EPS_M)).flatten(-2)
