"""The mean count over all processes by which losses are divided."""

import torch
from mmengine import dist
from torch import Tensor


def mean_count(counts: Tensor, device: torch.device) -> Tensor:
    """Return the mean of each count over all processes, but at least 1.

    Args:
        counts: the numbers of this process.
        device: the device of the result in a distributed run, where it is float32.
    """
    if dist.get_world_size() > 1:
        counts = counts.to(device, torch.float32, copy=True)
        dist.all_reduce(counts, op="mean")
    return counts.clamp(min=1.0)
