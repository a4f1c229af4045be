"""Switchable atrous convolution, and the convolution with standardised weights on which it is based."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..deform_conv2d import deform_conv2d

__all__ = ["ConvAWS2d", "SAConv2d"]


class ConvAWS2d(nn.Conv2d):
    """A convolution with adaptively standardised weights. Its name in configs is 'ConvAWS'.

    The weight of each output channel is standardised to mean 0 and deviation 1, multiplied by ``weight_gamma`` and
    added to ``weight_beta``. Loading a checkpoint of a plain convolution sets these buffers to its deviation and mean.
    """

    weight_gamma: Tensor
    weight_beta: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self.register_buffer("weight_gamma", torch.ones(out_channels, 1, 1, 1))
        self.register_buffer("weight_beta", torch.zeros(out_channels, 1, 1, 1))

    @staticmethod
    def _statistics(weight: Tensor) -> tuple[Tensor, Tensor]:
        flat = weight.flatten(1)
        mean, variance = flat.mean(1), flat.var(1)
        return mean.view(-1, 1, 1, 1), (variance + 1e-5).sqrt().view(-1, 1, 1, 1)

    def _get_weight(self, weight: Tensor) -> Tensor:
        mean, deviation = self._statistics(weight)
        return self.weight_gamma * ((weight - mean) / deviation) + self.weight_beta

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self._get_weight(self.weight), self.bias)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        weight, gamma = state_dict.get(f"{prefix}weight"), f"{prefix}weight_gamma"
        if weight is not None and gamma not in state_dict:
            mean, deviation = self._statistics(weight.detach().to(self.weight.dtype))
            state_dict |= {gamma: deviation, f"{prefix}weight_beta": mean}
        super()._load_from_state_dict(state_dict, prefix, *args)


class SAConv2d(ConvAWS2d):
    """Switchable atrous convolution, 'SAC' in configs: a blend, pixel by pixel, of dilation d and dilation 3 d.

    The switch starts at the first of the two; contexts before and after add the map's mean through a layer that
    starts at 0. ``use_deform`` makes both convolutions deformable, which needs a 3 x 3 kernel.

    Source: DetectoRS, arXiv 2006.02334; names of parameters are mmcv's.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        use_deform: bool = False,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias)
        self.use_deform = use_deform
        self.switch = nn.Conv2d(in_channels, 1, 1, stride=stride)
        self.weight_diff = nn.Parameter(torch.empty_like(self.weight))
        self.pre_context = nn.Conv2d(in_channels, in_channels, 1)
        self.post_context = nn.Conv2d(out_channels, out_channels, 1)
        if use_deform:
            self.offset_s = nn.Conv2d(in_channels, 18, 3, stride=stride, padding=1)
            self.offset_l = nn.Conv2d(in_channels, 18, 3, stride=stride, padding=1)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.zeros_(self.weight_diff)
        zeroed = [self.switch, self.pre_context, self.post_context]
        if self.use_deform:
            zeroed += [self.offset_s, self.offset_l]
        for layer in zeroed:
            nn.init.zeros_(layer.weight)
            if layer.bias is not None:
                nn.init.constant_(layer.bias, 1.0 if layer is self.switch else 0.0)

    def _branch(self, x: Tensor, weight: Tensor, factor: int, offset_layer: Any, smooth: Tensor) -> Tensor:
        padding = tuple(factor * int(p) for p in self.padding)
        dilation = tuple(factor * d for d in self.dilation)
        if offset_layer is None:
            return F.conv2d(x, weight, None, self.stride, padding, dilation, self.groups)
        offset = offset_layer(smooth)
        return deform_conv2d(x, offset, weight, self.stride, padding, dilation, self.groups, 1)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pre_context(F.adaptive_avg_pool2d(x, 1))
        smooth = F.avg_pool2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), 5, stride=1)
        switch = self.switch(smooth)
        weight = self._get_weight(self.weight)
        offsets = (self.offset_s, self.offset_l) if self.use_deform else (None, None)
        small = self._branch(x, weight, 1, offsets[0], smooth)
        large = self._branch(x, weight + self.weight_diff, 3, offsets[1], smooth)
        output = switch * small + (1 - switch) * large
        return output + self.post_context(F.adaptive_avg_pool2d(output, 1))
