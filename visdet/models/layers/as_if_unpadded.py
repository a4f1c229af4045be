"""Features of padded images that are those of the images alone."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .precision import at_least_float32


class Padding:
    """Where the images of a batch are padded, for the layers that compute each as if it were a batch of its own.

    Convolutions and poolings read zeros beyond an image, as they do at the border of a batch, and group norms leave the
    padding out. Layers that can do so take a ``padding`` in their ``forward`` (see :func:`takes_padding`).

    Args:
        image_sizes: [B, 2], the (height, width) of the images without padding, on their device.
        batch_size_px: the (height, width) of the batch.
    """

    def __init__(self, image_sizes: Tensor, batch_size_px: tuple[int, int]) -> None:
        self._image_sizes = image_sizes
        self._batch_size_px = batch_size_px
        self._inside: dict[torch.Size, Tensor] = {}

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
        size = x.shape[-2:]
        if size not in self._inside:
            rows, columns = self.sizes_on(size).view(-1, 2, 1, 1, 1).unbind(1)
            row, column = (torch.arange(length, device=x.device) for length in size)
            self._inside[size] = (row.unsqueeze(1) < rows) & (column < columns)
        return self._inside[size]

    def cleared(self, x: Tensor) -> Tensor:
        """Return a map [B, C, H, W] with zeros beyond each image, in the memory format of ``x``."""
        return torch.where(self.inside(x), x, 0.0)  # ``masked_fill`` gives the default format.

    def before(self, conv: nn.Module, x: Tensor) -> Tensor:
        """Return the map [B, C, H, W] that a convolution shall read, which is cleared if it reads several pixels."""
        return self.cleared(x) if max(conv.kernel_size) > 1 else x  # type: ignore[arg-type]

    def group_norm(self, norm: nn.GroupNorm, x: Tensor) -> Tensor:
        """Return the group norm of each image of a map [B, C, H, W]."""
        dtype = x.dtype if not torch.is_autocast_enabled(x.device.type) else at_least_float32(x).dtype
        inside = self.inside(x).unsqueeze(1)
        grouped = at_least_float32(x).unflatten(1, (norm.num_groups, -1))
        axes = (2, 3, 4)
        count = inside.sum(axes, keepdim=True) * grouped.shape[2]
        centred = grouped - (grouped * inside).sum(axes, keepdim=True) / count
        variance = (centred.square() * inside).sum(axes, keepdim=True) / count
        scaled = (centred * torch.rsqrt(variance + norm.eps)).flatten(1, 2)
        return (scaled * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)).to(dtype)


def takes_padding(module: nn.Module) -> bool:
    """Return whether a module computes each image as if it were not padded: its ``forward`` takes a ``padding``.

    Norms within it must be of each pixel or of stored statistics, or group norms.
    """
    if "padding" not in inspect.signature(type(module).forward).parameters:
        return False
    return not any(isinstance(part, nn.InstanceNorm2d) for part in module.modules())
