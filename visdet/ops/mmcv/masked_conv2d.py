"""A convolution that is computed at the marked positions only."""

import torch.nn.functional as F
from torch import Tensor, nn

from .._arguments import check_that, numbers_to, pair, widened
from .._declared import declared

__all__ = ["MaskedConv2d", "masked_conv2d"]


@declared(
    features="floating [B, C, H, W]",
    mask="mask [B, H, W]",
    weight="floating [C', C, KH, KW]",
    bias="None or floating [C']",
    padding="1 or 2 integers, at least 0",
    stride="1 or 2 integers, at least 1, at most 1",
)
def masked_conv2d(
    features: Tensor,  # [B, C, H, W]
    mask: Tensor,  # [B, H, W], counts where > 0
    weight: Tensor,  # [C', C, KH, KW]
    bias: Tensor | None = None,  # [C']
    padding: int | tuple[int, int] = 0,
    stride: int | tuple[int, int] = 1,
) -> Tensor:  # [B, C', H', W']
    """Return the convolution where ``mask`` is positive and 0 elsewhere. Only those positions are computed.

    Args:
        features: [B, C, H, W]. The map. float16 and bfloat16 are computed in float32, gradients included.
        mask: [B, H, W]. The positions that count are those above 0; a NaN does not count. A mask without any gives
            zeros.
        weight: [C', C, KH, KW]. The kernel.
        bias: [C']. The number added to each output channel where the mask is positive, or None.
        padding: (height, width) of the border of zeros, or one number for both.
        stride: It must be 1.

    Returns:
        [B, C', H', W']. The convolution in the type of ``features``.

    It is differentiable with respect to ``features``, ``weight`` and ``bias``; mmcv's has no gradient and takes B = 1
    only. Plain torch serves it, with a synchronisation on CUDA for the number of positions.

    Raises:
        ValueError: A shape, type, ``padding`` or ``stride`` does not fit. The message names the argument.

    Source: Guided anchoring, arXiv 1901.03278; the signature is mmcv's.
    """
    B, _, H, W = features.shape
    (pad_h, pad_w), (KH, KW) = pair(padding), weight.shape[2:]
    padded_height = H + 2 * pad_h
    padded_width = W + 2 * pad_w
    height = padded_height - KH + 1
    width = padded_width - KW + 1
    fits = min(KH, KW) >= 1 and min(height, width) >= 0
    given = f"{KH} x {KW}"
    expected = "have a kernel within the padded map of {} x {}"
    check_that(fits, "masked_conv2d", "weight", expected, given, padded_height, padded_width)
    kernel = widened(weight, features).permute(0, 2, 3, 1).flatten(1)
    bias = None if bias is None else widened(bias, features)
    image, row, column = (mask[:, :height, :width] > 0).nonzero().unbind(1)  # each [K]
    wide = widened(features, features)  # The gradients of a pixel's taps add up in this type.
    padded = F.pad(wide, (pad_w, pad_w, pad_h, pad_h)).permute(0, 2, 3, 1)  # [B, H + 2p, W + 2p, C]
    tap_row = row[:, None, None] + numbers_to(KH, mask)[:, None]
    tap_column = column[:, None, None] + numbers_to(KW, mask)
    taps = padded[image[:, None, None], tap_row, tap_column]  # [K, KH, KW, C]
    values = F.linear(taps.flatten(1), kernel, bias)  # [K, C']
    output = values.new_zeros(B, height, width, weight.shape[0])
    output = output.index_put((image, row, column), values).permute(0, 3, 1, 2).contiguous()
    return output.to(features)


class MaskedConv2d(nn.Conv2d):
    """A ``nn.Conv2d`` that takes a mask [B, H, W] as a second input. Without a mask it is the plain convolution."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return super().forward(input)
        if self.padding_mode != "zeros" or self.groups != 1 or pair(self.dilation) != (1, 1):  # type: ignore[arg-type]
            raise ValueError(
                "MaskedConv2d: with a mask, groups and dilation must be 1 and padding_mode 'zeros', got "
                f"{self.groups}, {self.dilation} and {self.padding_mode!r}"
            )
        return masked_conv2d(input, mask, self.weight, self.bias, self.padding, self.stride)  # type: ignore[arg-type]
