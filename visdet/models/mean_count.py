"""The mean count over all processes by which losses are divided."""

from typing import Any

import torch
from mmengine import dist
from torch import Tensor


def mean_count(counts: Tensor | int, device: torch.device) -> Any:
    """Return the mean of counts over all processes, but at least 1.

    Args:
        counts: a number, or a tensor whose elements are averaged one by one.
        device: the device of the result in a distributed run.

    Returns:
        In a distributed run, a float32 tensor of the shape of ``counts``. In a run of one process, a number stays a
        number, so that nothing is copied to the device.
    """
    if dist.get_world_size() == 1:
        return max(counts, 1) if isinstance(counts, int) else counts.clamp(min=1.0)
    total = torch.as_tensor(counts, dtype=torch.float32, device=device).clone()
    dist.all_reduce(total, op="mean")
    return total.clamp(min=1.0)
