"""What losses are divided by in a distributed run."""

from typing import Any

import torch
from mmengine import dist
from torch import Tensor

__all__ = ["mean_count"]


def mean_count(counts: Tensor | int, device: torch.device) -> Any:
    """Return the mean of counts over all processes of a distributed run, no less than 1.

    A number stays a number in a run of one process, so that nothing goes to the device.
    """
    if dist.get_world_size() == 1:
        return max(counts, 1) if isinstance(counts, int) else counts.clamp(min=1.0)
    total = torch.as_tensor(counts, dtype=torch.float32, device=device).clone()
    dist.all_reduce(total, op="mean")
    return total.clamp(min=1.0)
