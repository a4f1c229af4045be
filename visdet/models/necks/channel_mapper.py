"""A neck that gives every level the same number of channels and adds coarser levels."""

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS

from ..layers.conv_module import ConvModule

_RELU = {"type": "ReLU"}
_XAVIER = {"type": "Xavier", "layer": "Conv2d", "distribution": "uniform"}


@MODELS.register_module()
class ChannelMapper(BaseModule):
    """One convolution per input level, and a 3x3 convolution of stride 2 for each further level.

    The first further level is computed from the last input, and each other one from the level before it.

    Args:
        in_channels: channels of each input level.
        out_channels: channels of every output level.
        kernel_size: size of the convolutions of the input levels.
        norm_cfg, act_cfg, bias: as in ``ConvModule``. If convolutions have no bias, but the weights that are loaded
            have, as those of the original implementations, these biases are added. They are not trained.
        num_outs: number of output levels, at least ``len(in_channels)``, which is the default.

    Raises:
        ValueError: ``num_outs`` is too small.

    Source: names and defaults are mmdet's.
    """

    def __init__(
        self,
        in_channels: list[int] | tuple[int, ...],
        out_channels: int,
        kernel_size: int = 3,
        norm_cfg: dict[str, Any] | None = None,
        act_cfg: dict[str, Any] | None = _RELU,
        bias: bool | str = "auto",
        num_outs: int | None = None,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = _XAVIER,
    ) -> None:
        super().__init__(init_cfg)
        num_outs = len(in_channels) if num_outs is None else num_outs
        if num_outs < len(in_channels):
            raise InvalidInputError(
                f"ChannelMapper: num_outs must be at least the number of inputs {len(in_channels)}, got {num_outs}"
            )
        options: dict[str, Any] = {"norm_cfg": norm_cfg, "act_cfg": act_cfg, "bias": bias}
        self.in_channels = in_channels
        self.convs = nn.ModuleList(
            ConvModule(channels, out_channels, kernel_size, padding=(kernel_size - 1) // 2, **options)
            for channels in in_channels
        )
        self.extra_convs = nn.ModuleList(
            ConvModule(
                in_channels[-1] if i == 0 else out_channels, out_channels, 3, stride=2, padding=1, **options
            )
            for i in range(num_outs - len(in_channels))
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take over the biases that original implementations have before a normalisation. They are not trained."""
        for name, module in self.named_modules():
            bias = state_dict.get(f"{prefix}{name}.bias")
            if bias is not None and getattr(module, "bias", self) is None:
                zeros = torch.zeros_like(module.weight[:, 0, 0, 0])  # type: ignore[index]
                if bias.shape == zeros.shape:
                    module.bias = nn.Parameter(zeros, requires_grad=False)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return ``num_outs`` maps [B, out_channels, H_l, W_l] from ``len(in_channels)`` maps [B, C_l, H_l, W_l]."""
        check_feature_maps("ChannelMapper", inputs, self.in_channels)
        outs = [conv(level) for conv, level in zip(self.convs, inputs, strict=True)]
        coarsest = inputs[-1]
        for conv in self.extra_convs:
            coarsest = conv(coarsest)
            outs.append(coarsest)
        return tuple(outs)


def check_feature_maps(neck: str, inputs: Sequence[Tensor], in_channels: Sequence[int]) -> None:
    """Raise an InvalidInputError unless the maps [B, C_l, H_l, W_l] have the channels that a neck was built for."""
    given = [level.shape[1] for level in inputs]
    if given != list(in_channels):
        raise InvalidInputError(
            f"{neck}: in_channels is {list(in_channels)}, but the feature maps have {given} channels"
        )
