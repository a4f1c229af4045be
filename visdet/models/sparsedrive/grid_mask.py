"""GridMask augmentation on the device."""

import torch
from torch import Tensor, nn


class GridMask(nn.Module):
    """Keeps a random grid of rows and columns in training and blanks the rest, alike in all images of a batch.

    The period d of the grid is uniform in 2..height-1. Its stripes have the width d / 2 and a random phase.

    Args:
        prob: probability that images are blanked.

    Source: Chen et al., arXiv 2001.04086, with SparseDrive's options (``use_h=True, use_w=True, rotate=1, offset=False,
    ratio=0.5, mode=1, prob=0.7``). One thing differs: torch draws the random numbers on the device of the images, so
    that nothing waits for the device.
    """

    def __init__(self, prob: float = 0.7) -> None:
        super().__init__()
        self.prob = prob

    def forward(self, x: Tensor) -> Tensor:
        """Return images x [N, C, H, W] with the grid, or unchanged in evaluation."""
        if not self.training:
            return x
        height, width = x.shape[-2:]
        device = x.device
        draws = torch.rand(4, device=device)
        period = (2 + draws[0] * (height - 2)).floor().clamp(max=max(height - 1, 2))
        keep = _in_stripe(height, period, draws[1])[:, None] | _in_stripe(width, period, draws[2])
        return torch.where(torch.rand((), device=device) <= self.prob, x * keep.to(x.dtype), x)


def _in_stripe(length: int, period: Tensor, draw: Tensor) -> Tensor:
    """Return [length], whether each position lies in a stripe of a grid that is half as long again."""
    plane = int(1.5 * length)
    beyond = torch.arange(length, device=draw.device) + (plane - length) // 2 - (draw * period).floor()
    width = torch.minimum(((period + 1) // 2).clamp(min=1), period - 1)
    return (beyond >= 0) & (beyond // period < plane // period) & (beyond % period < width)
