"""Convolution, normalisation and activation as one block."""

from typing import Any, Literal

import torch
from mmengine.model import BaseModule, constant_init, initialize, kaiming_init
from torch import Tensor, nn

from visdet.registry import MODELS

from .as_if_unpadded import Padding
from .builders import build_activation_layer
from .linear import linear
from .normalization import build_norm_layer, norm_abbreviation
from .plain import is_plain

_RELU = {"type": "ReLU"}


@MODELS.register_module()
class ConvModule(BaseModule):
    """A 2-D convolution, followed by a normalisation and an activation if they are asked for.

    Parameter names: ``conv.weight``, ``conv.bias`` and, depending on the normalisation, ``bn.*``, ``gn.*``, ``ln.*`` or
    ``in.*``.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode: as in ``nn.Conv2d``.
        bias: True, False, or 'auto', which means a bias if and only if no normalisation follows.
        norm_cfg: config for ``build_norm_layer``, or None for no normalisation.
        act_cfg: config for ``build_activation_layer``, or None for no activation.
        inplace: whether the activation may overwrite its input.
        init_cfg: mmengine's initialisation, after the default one. That draws the weights of the convolution from
            Kaiming's normal distribution (fan out, ReLU), and sets the scale of the normalisation to 1 and its shift
            to 0.

    Source: names and defaults are mmcv's.
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
        bias: bool | str = "auto",
        norm_cfg: dict[str, Any] | None = None,
        act_cfg: dict[str, Any] | None = _RELU,
        inplace: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.conv = nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=norm_cfg is None if bias == "auto" else bool(bias),
            padding_mode=padding_mode,
        )
        self.norm_name = None
        if norm_cfg is not None:
            norm = build_norm_layer(norm_cfg, out_channels)
            self.norm_name = norm_abbreviation(type(norm))
            self.add_module(self.norm_name, norm)
        self.activate = None if act_cfg is None else build_activation_layer(act_cfg, inplace=inplace)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise the weights. The ``init_cfg`` of an enclosing module may initialise them again later."""
        kaiming_init(self.conv)
        if self.norm_name is not None:
            constant_init(getattr(self, self.norm_name), 1.0)
        if self.init_cfg:
            initialize(self, self.init_cfg)
        self.is_init = True

    def forward(self, x: Tensor, padding: Padding | None = None) -> Tensor:
        """Return [B, out_channels, H', W'] from x [B, in_channels, H, W], of images that may have a ``padding``."""
        x = self._convolved(x if padding is None else padding.before(self.conv, x))
        if self.norm_name is not None:
            norm = getattr(self, self.norm_name)
            x = padding.group_norm(norm, x) if padding and isinstance(norm, nn.GroupNorm) else norm(x)
        if self.activate is not None:
            x = self.activate(x)
        return x

    def _convolved(self, x: Tensor) -> Tensor:
        """Return ``conv(x)``. In training on a GPU, a product adds the bias of a 1x1 convolution as it writes."""
        conv = self.conv
        is_linear = conv.kernel_size == conv.stride == (1, 1) and conv.padding == (0, 0) and conv.groups == 1
        trains_on_gpu = x.is_cuda and torch.is_grad_enabled() and is_plain(conv, nn.Conv2d)
        if (
            conv.bias is None
            or not (is_linear and trains_on_gpu)
            or not x.is_contiguous(memory_format=torch.channels_last)
        ):
            return conv(x)
        return linear(x.permute(0, 2, 3, 1), conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)
