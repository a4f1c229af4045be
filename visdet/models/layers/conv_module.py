"""Convolution, normalisation and activation as one block."""

from typing import Any

from mmengine.model import BaseModule, constant_init, initialize, kaiming_init
from torch import Tensor, nn

from visdet.registry import MODELS

from .activation import build_activation_layer
from .normalization import build_norm_layer, norm_abbreviation

__all__ = ["ConvModule"]

_RELU = {"type": "ReLU"}


@MODELS.register_module()
class ConvModule(BaseModule):
    """A 2-D convolution, then the normalisation and the activation that are asked for.

    Parameter names: ``conv.weight``, ``conv.bias`` and ``bn.*``, ``gn.*``, ``ln.*`` or ``in.*`` by the kind of norm.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode: as in ``nn.Conv2d``.
        bias: True, False, or 'auto': a bias exactly where no normalisation follows.
        norm_cfg: see ``build_norm_layer``; None for none.
        act_cfg: see ``build_activation_layer``; None for none.
        inplace: whether the activation may overwrite its input.
        init_cfg: mmengine's initialisation; without it Kaiming normal (fan out, ReLU), norm scale 1 and shift 0.

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
        padding_mode: str = "zeros",
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
        """Draw the convolution's weights; a later ``init_cfg`` of an enclosing module may draw them anew."""
        kaiming_init(self.conv)
        if self.norm_name is not None:
            constant_init(getattr(self, self.norm_name), 1.0)
        if self.init_cfg:
            initialize(self, self.init_cfg)
        self.is_init = True

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, out_channels, H', W'] from x [B, in_channels, H, W]."""
        x = self.conv(x)
        if self.norm_name is not None:
            x = getattr(self, self.norm_name)(x)
        if self.activate is not None:
            x = self.activate(x)
        return x
