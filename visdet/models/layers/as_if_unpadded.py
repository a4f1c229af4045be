"""Features of padded images that are those of the images alone."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .precision import at_least_float32

_POOLING = F.max_pool2d
_CONVOLUTIONS = (torch.conv2d, torch.cudnn_convolution_relu, torch.cudnn_convolution_add_relu)


class AsIfUnpadded(TorchFunctionMode):
    """Within the block, each image of a batch gets the features that it would have in a batch of its own.

    Convolutions and poolings read zeros beyond an image, as they do at the border of a batch, and group norms leave the
    padding out. This is exact for ResNet and ChannelMapper.

    Args:
        image_sizes: [B, 2], the (height, width) of the images without padding, on their device.
        batch_size_px: the (height, width) of the batch.
    """

    def __init__(self, image_sizes: Tensor, batch_size_px: tuple[int, int]) -> None:
        super().__init__()
        self._image_sizes, self._batch_size_px = image_sizes, batch_size_px
        self._inside: dict[tuple[int, int], Tensor] = {}

    def sizes_on(self, map_size: Sequence[int]) -> Tensor:
        """Return the (height, width) [B, 2] of the images on a map that strides of 2 have made of the batch."""
        sizes = []
        for images, side, length in zip(
            self._image_sizes.unbind(1), self._batch_size_px, map_size, strict=True
        ):
            stride = 1
            while -(-side // stride) > length:
                stride *= 2
            sizes.append(-(-images // stride))
        return torch.stack(sizes, dim=1)

    def inside(self, x: Tensor) -> Tensor:
        """Return where a map [B, C, H, W] is not padding, bool [B, 1, H, W]."""
        height, width = x.shape[-2:]
        if (height, width) not in self._inside:
            rows, columns = (side.view(-1, 1, 1, 1) for side in self.sizes_on((height, width)).unbind(1))
            row, column = (torch.arange(length, device=x.device) for length in (height, width))
            self._inside[height, width] = (row.unsqueeze(1) < rows) & (column < columns)
        return self._inside[height, width]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.group_norm:
            return self._group_norm(*args, **(kwargs or {}))
        if func is _POOLING or (func in _CONVOLUTIONS and max(args[1].shape[2:]) > 1):
            args = (args[0].masked_fill(~self.inside(args[0]), 0.0), *args[1:])
        return func(*args, **(kwargs or {}))

    def _group_norm(self, x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        dtype = x.dtype if not torch.is_autocast_enabled(x.device.type) else at_least_float32(x).dtype
        inside = self.inside(x).unsqueeze(1)
        grouped = at_least_float32(x).unflatten(1, (groups, -1))
        count = inside.sum((2, 3, 4), keepdim=True) * grouped.shape[2]
        centred = grouped - (grouped * inside).sum((2, 3, 4), keepdim=True) / count
        variance = (centred.square() * inside).sum((2, 3, 4), keepdim=True) / count
        scaled = (centred * torch.rsqrt(variance + eps)).flatten(1, 2)
        return (scaled * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)).to(dtype)
