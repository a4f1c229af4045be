"""CARAFE, which upsamples a map by a kernel that is predicted for each pixel of the result."""

import torch.nn.functional as F
from torch import Tensor, nn

from . import _registration
from ._arguments import widened
from ._declared import declared
from ._modules import OperatorModule

__all__ = ["CARAFE", "CARAFENaive", "CARAFEPack", "carafe", "carafe_naive", "carafe_reference"]


@declared(
    features="any [B, C, H, W]",
    masks="real",
    kernel_size="integer, at least 1",
    group_size="integer, at least 1",
    scale_factor="integer, at least 1",
)
def carafe(
    features: Tensor,  # [B, C, H, W]
    masks: Tensor,  # [B, K * K * G, H * s, W * s]
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> Tensor:  # [B, C, H * s, W * s]
    """Return each pixel (y, x) as the sum of the K x K pixels around (y // s, x // s), weighted by its own kernel.

    Args:
        features: [B, C, H, W]. The map, float64, float32, float16 or bfloat16. Pixels outside it are zeros.
        masks: [B, K * K * G, H * s, W * s]. The kernels, row by row, one for each of G groups of channels. They are
            usually a softmax over K * K, and are converted to the type of ``features``.
        kernel_size: K, an odd number of pixels.
        group_size: G, the number of groups, which divides C.
        scale_factor: s, the factor of the size, at least 1.

    Returns:
        [B, C, H * s, W * s]. The sums, taken in float32 (float64 for float64), in the type of ``features``.

    It is differentiable once with respect to ``features`` and ``masks``. The inputs are saved for the backward. It is
    deterministic, for any number of threads. NaN and infinity go where the formula takes them.

    Raises:
        ValueError: ``features`` has no four dimensions, or a number is no positive integer.
        RuntimeError: Another shape or number does not fit. The messages name the argument.

    Source: CARAFE, arXiv 1905.02188; the signature and the order of the masks are mmcv's.
    """
    return _carafe(features, masks.to(features), kernel_size, group_size, scale_factor)


def carafe_reference(
    features: Tensor, masks: Tensor, kernel_size: int, group_size: int, scale_factor: int
) -> Tensor:
    """Return what ``carafe`` returns, in plain torch: the definition kernels are tested against."""
    B, C, H, W = features.shape
    K, G, s = kernel_size, group_size, scale_factor
    padded = widened(F.pad(features, [K // 2] * 4), features).view(B, G, C // G, H + K - 1, 1, W + K - 1, 1)
    kernels = widened(masks, features).reshape(B, G, 1, K * K, H, s, W, s)
    output = padded.new_zeros(B, G, C // G, H, s, W, s)
    for k in range(K * K):
        i, j = divmod(k, K)
        output = output + padded[:, :, :, i : i + H, :, j : j + W] * kernels[:, :, :, k]
    return output.view(B, C, H * s, W * s).to(features)


_carafe = _registration.differentiable(
    "carafe",
    "features [B, C, H * scale_factor, W * scale_factor]",
    layouts={"features": "[B, C, H, W]"},
    elsewhere=carafe_reference,
    needs_library=False,
)


def carafe_naive(
    features: Tensor, masks: Tensor, kernel_size: int, group_size: int, scale_factor: int
) -> Tensor:
    """Return ``carafe`` of the same arguments, under the name of mmcv's first implementation."""
    return carafe(features, masks, kernel_size, group_size, scale_factor)


class CARAFE(OperatorModule):
    """A module that calls ``carafe`` with its settings."""

    operator = staticmethod(carafe)

    def __init__(self, kernel_size: int, group_size: int, scale_factor: int) -> None:
        super().__init__(kernel_size=kernel_size, group_size=group_size, scale_factor=scale_factor)

    def forward(self, features: Tensor, masks: Tensor) -> Tensor:
        return self._call(features, masks)


class CARAFENaive(CARAFE):
    """``CARAFE`` under the name of mmcv's first implementation."""


class CARAFEPack(nn.Module):
    """An upsampler that predicts its own kernels. Its name in configs is 'carafe'.

    Args:
        channels: The number of channels of the map.
        scale_factor: The factor of the size.
        up_kernel: The ``kernel_size`` of ``carafe``.
        up_group: The ``group_size`` of ``carafe``.
        encoder_kernel: The kernel size of the convolution that predicts the kernels.
        encoder_dilation: The dilation of that convolution.
        compressed_channels: The number of channels to which the map is reduced for that convolution.
    """

    def __init__(
        self,
        channels: int,
        scale_factor: int,
        up_kernel: int = 5,
        up_group: int = 1,
        encoder_kernel: int = 3,
        encoder_dilation: int = 1,
        compressed_channels: int = 64,
    ) -> None:
        super().__init__()
        self.channels, self.scale_factor = channels, scale_factor
        self.up_kernel, self.up_group = up_kernel, up_group
        self.encoder_kernel, self.encoder_dilation = encoder_kernel, encoder_dilation
        self.compressed_channels = compressed_channels
        self.channel_compressor = nn.Conv2d(channels, compressed_channels, 1)
        self.content_encoder = nn.Conv2d(
            compressed_channels,
            up_kernel * up_kernel * up_group * scale_factor * scale_factor,
            encoder_kernel,
            padding=(encoder_kernel - 1) * encoder_dilation // 2,
            dilation=encoder_dilation,
        )
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.xavier_uniform_(self.channel_compressor.weight)
        nn.init.normal_(self.content_encoder.weight, std=0.001)
        for layer in (self.channel_compressor, self.content_encoder):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def kernel_normalizer(self, mask: Tensor) -> Tensor:
        """Return kernels [B, K * K * G, H * s, W * s] that sum to 1."""
        mask = F.pixel_shuffle(mask, self.scale_factor)
        return mask.unflatten(1, (-1, self.up_kernel**2)).softmax(2, dtype=mask.dtype).flatten(1, 2)

    def feature_reassemble(self, x: Tensor, mask: Tensor) -> Tensor:
        return carafe(x, mask, self.up_kernel, self.up_group, self.scale_factor)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.kernel_normalizer(self.content_encoder(self.channel_compressor(x)))
        return self.feature_reassemble(x, mask)
