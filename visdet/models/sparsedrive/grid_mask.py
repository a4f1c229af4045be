"""GridMask augmentation on the device."""

import torch
from torch import Tensor, nn


class GridMask(nn.Module):
    """Blanks a random grid in training, the same in all images of a batch, with probability ``prob``.

    The period d of the grid is uniform in 2..height-1. Its stripes have the width ``ratio`` · d and a random phase. The
    grid is turned by 0 to ``rotate`` - 1 degrees.

    Args:
        use_h, use_w: whether there are horizontal and vertical stripes.
        rotate: upper bound of the angle in degrees, exclusive. With 1 the grid is not turned.
        offset: whether the blanked pixels become noise in -1..1 instead of 0.
        ratio: fraction of a period that is a stripe.
        mode: 0 blanks the stripes, 1 everything else.
        prob: probability that images are blanked.

    Source: Chen et al., arXiv 2001.04086; names and defaults are SparseDrive's. One thing differs: torch draws the
    random numbers on the device of the images, so that nothing waits for the device.
    """

    def __init__(
        self,
        use_h: bool,
        use_w: bool,
        rotate: int = 1,
        offset: bool = False,
        ratio: float = 0.5,
        mode: int = 0,
        prob: float = 1.0,
    ) -> None:
        super().__init__()
        self.use_h = use_h
        self.use_w = use_w
        self.rotate = rotate
        self.offset = offset
        self.ratio = ratio
        self.mode = mode
        self.prob = prob

    def forward(self, x: Tensor) -> Tensor:
        """Return images x [N, C, H, W] with the grid, or unchanged in evaluation."""
        if not self.training or self.prob <= 0:
            return x
        keep = self._mask(x.shape[-2], x.shape[-1], x.device).to(x.dtype)
        filler = 2 * torch.rand(x.shape[-2:], device=x.device, dtype=x.dtype) - 1 if self.offset else 0.0
        masked = x * keep + filler * (1 - keep)
        return torch.where(torch.rand((), device=x.device) <= self.prob, masked, x)

    def _mask(self, height: int, width: int, device: torch.device) -> Tensor:
        """Return [H, W], 1 where the image is kept and 0 where it is blanked."""
        draws = torch.rand(4, device=device)
        period = (2 + draws[0] * (height - 2)).floor().clamp(max=max(height - 1, 2))
        stripe = torch.minimum((period * self.ratio + 0.5).floor().clamp(min=1), period - 1)
        # The grid lies on a plane that is half as large again, so that it covers the image when it is turned.
        plane_h, plane_w = int(1.5 * height), int(1.5 * width)
        rows = torch.arange(height, device=device)[:, None] + (plane_h - height) // 2
        columns = torch.arange(width, device=device)[None, :] + (plane_w - width) // 2
        angle = torch.deg2rad((draws[3] * self.rotate).floor())
        y, x = rows - (plane_h - 1) / 2, columns - (plane_w - 1) / 2
        turned_rows = (angle.cos() * y + angle.sin() * x + (plane_h - 1) / 2).round()
        turned_columns = (angle.cos() * x - angle.sin() * y + (plane_w - 1) / 2).round()
        is_blank = torch.zeros(height, width, dtype=torch.bool, device=device)
        if self.use_h:
            is_blank = is_blank | self._in_stripe(turned_rows, period, stripe, draws[1], plane_h)
        if self.use_w:
            is_blank = is_blank | self._in_stripe(turned_columns, period, stripe, draws[2], plane_w)
        return is_blank.float() if self.mode == 1 else 1 - is_blank.float()

    @staticmethod
    def _in_stripe(position: Tensor, period: Tensor, stripe: Tensor, draw: Tensor, length: int) -> Tensor:
        """Return whether positions lie in one of the ``length // period`` stripes that follow a random phase."""
        beyond = position - (draw * period).floor()
        number = (beyond / period).floor()
        return (beyond >= 0) & (number < (length / period).floor()) & (beyond - number * period < stripe)
