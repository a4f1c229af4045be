"""The first convolution of a backbone, computed on blocks of pixels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.ops.tracing import is_traced

from .plain import is_plain
from .precision import HALF_TYPES, autocast_dtype

# kernel size, stride, padding, dilation, groups and padding mode of the first convolution of a ResNet
_GEOMETRY = ((7, 7), (2, 2), (3, 3), (1, 1), 1, "zeros")
_BLOCK = 2  # pixels along each side
_CHANNEL_MULTIPLE = 16  # The kernels of cuDNN that use the matrix units read so many 16-bit channels at once.


def suits_blocks(conv: nn.Module, x: Tensor) -> bool:
    """Return whether ``in_blocks`` saves time: for few channels in 16 bits on a GPU.

    Args:
        conv: the convolution. x: its input [B, C, H, W].
    """
    if not is_plain(conv, nn.Conv2d) or not x.is_cuda or is_traced():
        return False
    own = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)
    if own != _GEOMETRY or conv.bias is not None:
        return False
    is_short = _BLOCK**2 * conv.in_channels <= _CHANNEL_MULTIPLE
    return is_short and autocast_dtype(x) in HALF_TYPES


def in_blocks(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return images and weights whose plain convolution is that of the given ones with stride 2 and padding 3.

    The channels of the images are those of blocks of 2 x 2 pixels. So the matrix units of a GPU compute the first
    convolution of a ResNet, for whose three channels cuDNN has slow kernels only.

    Args:
        x: [B, C, H, W], in any type.
        weight: [O, C, 7, 7].

    Returns:
        The blocks [B, C', (H + 1) // 2 + 3, (W + 1) // 2 + 3], of which two before the image and one behind it are
        zeros, in the type in which a convolution reads ``x``, and the weights [O, C', 4, 4]. Both have their channels
        last.
    """
    batch, channels, height, width = x.shape
    below = height % _BLOCK
    right = width % _BLOCK
    if below or right:
        x = F.pad(x, (0, right, 0, below))
    rows = (height + below) // _BLOCK
    columns = (width + right) // _BLOCK
    used = _BLOCK**2 * channels
    all_channels = -(-used // _CHANNEL_MULTIPLE) * _CHANNEL_MULTIPLE
    blocks = x.new_zeros(batch, rows + 3, columns + 3, all_channels, dtype=autocast_dtype(x))
    inner = blocks[:, 2:-1, 2:-1, :used].unflatten(-1, (channels, _BLOCK, _BLOCK))
    inner.copy_(x.reshape(batch, channels, rows, _BLOCK, columns, _BLOCK).permute(0, 2, 4, 1, 3, 5))

    whole = F.pad(weight, (1, 0, 1, 0))  # [O, C, 8, 8]
    of_blocks = F.pad(F.pixel_unshuffle(whole, _BLOCK), (0, 0, 0, 0, 0, all_channels - used))
    return blocks.permute(0, 3, 1, 2), of_blocks.contiguous(memory_format=torch.channels_last)
