"""Modulated deformable convolution: offsets and a factor for each tap."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ._offset_layers import rename_offset_layer
from ._renamed import renamed_arguments
from ._roi_sampling import pair
from .deform_conv2d import Pair, check, convolve, output_shape

__all__ = ["ModulatedDeformConv2d", "ModulatedDeformConv2dPack", "modulated_deform_conv2d"]


def modulated_deform_conv2d(
    input: Tensor,  # [B, C, H, W]
    offset: Tensor,  # [B, G * 2 * KH * KW, H', W'] (y, x) of each tap
    mask: Tensor,  # [B, G * KH * KW, H', W']
    weight: Tensor,  # [C', C / groups, KH, KW]
    bias: Tensor | None = None,  # [C']
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    deform_groups: int = 1,
) -> Tensor:  # [B, C', H', W']
    """Return ``deform_conv2d`` with each tap's sample multiplied by ``mask``, plus ``bias``.

    Types, borders and who serves it: as ``deform_conv2d``. Differentiable with respect to all tensors.

    Raises:
        ValueError: a shape does not fit.

    Source: Deformable ConvNets v2, CVPR 2019; the signature is mmcv's.
    """
    if input.dim() != 4:
        raise ValueError(f"modulated_deform_conv2d: input must be [B, C, H, W], got {list(input.shape)}")
    size = output_shape(input, weight, stride, padding, dilation)
    check("modulated_deform_conv2d", input, offset, weight, deform_groups, groups, size)
    expected = [input.shape[0], deform_groups * weight.shape[2] * weight.shape[3], *size]
    if list(mask.shape) != expected:
        raise ValueError(f"modulated_deform_conv2d: mask must be {expected}, got {list(mask.shape)}")
    return convolve(input, offset, mask, weight, bias, stride, padding, dilation, deform_groups)


class ModulatedDeformConv2d(nn.Module):
    """Modulated deformable convolution with a weight and a bias; offset and mask are inputs."""

    @renamed_arguments(deformable_groups="deform_groups")
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        deform_groups: int = 1,
        bias: bool | str = True,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = pair(kernel_size)
        self.stride, self.padding, self.dilation = pair(stride), pair(padding), pair(dilation)
        self.groups, self.deform_groups = groups, deform_groups
        self.transposed, self.output_padding = False, (0,)  # what code for nn.Conv2d looks at
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.init_weights()

    def init_weights(self) -> None:
        bound = 1 / math.sqrt(self.in_channels * self.kernel_size[0] * self.kernel_size[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, offset: Tensor, mask: Tensor) -> Tensor:
        return modulated_deform_conv2d(
            x,
            offset,
            mask,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.deform_groups,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"deform_groups={self.deform_groups}, bias={self.bias is not None}"
        )


class ModulatedDeformConv2dPack(ModulatedDeformConv2d):
    """The same with offsets and masks of a convolution of its own, 'DCNv2' in configs.

    ``conv_offset`` starts at zero: offsets 0, masks 0.5. The first two thirds of its channels are the offset
    field, the last third the masks before the sigmoid. State dicts: as ``DeformConv2dPack``.
    """

    _version = 2
    has_offset_layer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conv_offset = nn.Conv2d(
            self.in_channels,
            self.deform_groups * 3 * self.kernel_size[0] * self.kernel_size[1],
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
        )
        self.init_weights()

    def init_weights(self) -> None:
        super().init_weights()
        if hasattr(self, "conv_offset"):
            nn.init.zeros_(self.conv_offset.weight)
            if self.conv_offset.bias is not None:
                nn.init.zeros_(self.conv_offset.bias)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        first, second, mask = self.conv_offset(x).chunk(3, dim=1)
        return super().forward(x, torch.cat([first, second], 1), mask.sigmoid())

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, *args: Any) -> None:
        rename_offset_layer(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
