"""The measured bandwidths of a device, and the least time of a pass that follows from them."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from .case import Work
from .environment import synchronize

Curve = tuple[tuple[float, float], ...]  # (footprint in bytes, bytes per second), by footprint


@dataclass(frozen=True)
class Floors:
    """Bandwidths of one device in bytes per second. A bandwidth of None is not known and bounds nothing."""

    source: str
    copy: float  # streaming, bytes read + written
    l1: float | None = None
    rows: Curve | None = None  # reads of random rows from the last-level cache or memory
    reductions: Curve | None = None  # float32 additions to random rows

    def bound(self, work: Work, warm: bool = False) -> float:
        """Return the least time of ``work`` in seconds.

        Different resources work at the same time, so that the largest time counts. Row rates were measured on 128-byte
        rows. A design that sorts instead of reducing, or a smaller working set than assumed, can be faster. The result
        is therefore a yardstick and not a strict bound.

        Args:
            work: the bytes.
            warm: inputs and outputs stay in the last-level cache, so that its row rate replaces the copy rate.
        """
        streaming = _at(self.rows, work.moved) if warm and self.rows else self.copy
        seconds = [work.moved / streaming]
        if self.l1:
            seconds.append(work.gathered / self.l1)
        if self.rows and work.rows:
            seconds.append(work.rows / _at(self.rows, work.rows_footprint))
        if self.reductions and work.reductions:
            seconds.append(work.reductions / _at(self.reductions, work.reductions_footprint))
        return max(seconds)


# Each rate was measured by a kernel that does nothing else. The first point of each curve also applies to smaller
# footprints, and the last one to larger footprints.
H200 = Floors(
    source="NVIDIA H200: copy 4.27 TB/s, L1 30 TB/s, random 128-byte rows and float32 reductions by footprint",
    copy=4.27e12,
    l1=30e12,
    rows=((4e6, 8.6e12), (18e6, 8.2e12), (36e6, 7.5e12), (92e6, 5.0e12)),
    reductions=((4e6, 3.8e12), (36e6, 3.5e12), (92e6, 1.7e12)),
)


def floors_of(device: torch.device, name: str) -> Floors:
    """Return the floors of ``device``. If its ``name`` is not known, the bandwidth of a copy is measured now."""
    if device.type == "cuda" and "H200" in name:
        return H200
    copy = _measure_copy(device)
    return Floors(source=f"copy {copy / 1e12:.3g} TB/s, measured in this run; caches not modelled", copy=copy)


def _at(curve: Curve, footprint: float) -> float:
    footprints, rates = zip(*curve, strict=True)
    return float(np.interp(footprint, footprints, rates))


def _measure_copy(device: torch.device) -> float:
    """Return the best of several copies, in bytes read + written per second."""
    size = 1 << 30 if device.type == "cuda" else 1 << 27  # far beyond the caches
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        synchronize(device)
        best = min(best, (time.perf_counter() - begin) / 4)
    return 2 * size / best
