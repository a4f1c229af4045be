"""Images whose channels lie side by side, as decoders return them. OpenCV splits them faster than torch."""

import cv2
import numpy as np
import torch
from torch import Tensor

_DTYPES = (torch.uint8, torch.float32)
_MOST_CHANNELS = 4


def split_channels(image: Tensor) -> Tensor:
    """Return an image [C, H, W] as a contiguous tensor."""
    C, H, W = image.shape
    is_interleaved = 1 < C <= _MOST_CHANNELS and image.stride(0) == 1 and image.stride(2) == C
    if not is_interleaved or image.dtype not in _DTYPES or min(H, W) == 0 or image.device.type != "cpu":
        return image.contiguous()
    pixels = image.as_subclass(Tensor).permute(1, 2, 0).numpy()
    channels = np.empty(image.shape, pixels.dtype)
    cv2.split(pixels, list(channels))  # writes into these arrays, since they have the right sizes
    return torch.from_numpy(channels)
