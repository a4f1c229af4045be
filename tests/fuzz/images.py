"""Images, and positions in them that are near a whole number of pixels."""

import torch
from torch import Tensor

from tests.fuzz.problem import Draw, wide_of
from tests.fuzz.sampling import near_whole

__all__ = ["draw_images", "near_pixels", "sample_sizes"]


def draw_images(draw: Draw, C: int, big: bool) -> Tensor:
    B = draw.size(3)
    H, W = (draw.size(64, 0), draw.size(128, 0)) if big else (draw.size(14, 0.01), draw.size(14, 0.01))
    images = draw.numbers(B, C, H, W)
    images = draw.place(images, draw.dtype(), bad=0.5)
    return images.contiguous(memory_format=torch.channels_last) if draw.chance(0.2) else images


def near_pixels(images: Tensor, samples: Tensor) -> Tensor:
    size = torch.tensor(images.shape[:1:-1], device=samples.device)
    return near_whole((samples.detach().to(wide_of(images.dtype)).double() + 1) / 2, size)


def sample_sizes(draw: Draw, big: bool) -> tuple[int, int, int, int]:
    """Return C, G, Q and D."""
    if big:
        Q, D = draw.pick((64, 31), (256, 123), (900, 13)) if draw.device == "cuda" else (32, 31)
        return draw.pick(140, 64, 30, 256), draw.pick(1, 4, 8), Q, D
    C = draw.pick(1, 2, 3, 4, 5, 8, 13, 16, 30, 64, 71) if draw.chance(0.95) else draw.pick(0, 140, 1025)
    return C, draw.size(9), draw.size(12), draw.size(12)
