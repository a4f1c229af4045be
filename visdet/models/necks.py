"""Necks, which give the maps of a backbone one number of channels."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.checks.arguments import also_takes
from visdet.errors import InvalidInputError
from visdet.registry import MODELS

from .layers.as_if_unpadded import Padding
from .layers.conv_module import ConvModule
from .layers.twice_as_large import add_twice_as_large

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

    @also_takes(conv_cfg=None)
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
        num_inputs = len(in_channels)
        num_outs = num_inputs if num_outs is None else num_outs
        if num_outs < num_inputs:
            raise InvalidInputError(
                f"ChannelMapper: num_outs must be at least the number of inputs {num_inputs}, got {num_outs}"
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
            for i in range(num_outs - num_inputs)
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

    def forward(self, inputs: tuple[Tensor, ...], padding: Padding | None = None) -> tuple[Tensor, ...]:
        """Return ``num_outs`` maps [B, out_channels, H_l, W_l] from ``len(in_channels)`` maps [B, C_l, H_l, W_l].

        With a ``padding``, they are those of each image alone.
        """
        check_feature_maps("ChannelMapper", inputs, self.in_channels)
        outs = [conv(level, padding) for conv, level in zip(self.convs, inputs, strict=True)]
        coarsest = inputs[-1]
        for conv in self.extra_convs:
            coarsest = conv(coarsest, padding)
            outs.append(coarsest)
        return tuple(outs)


def check_feature_maps(neck: str, inputs: Sequence[Tensor], in_channels: Sequence[int]) -> None:
    """Raise an InvalidInputError unless the maps [B, C_l, H_l, W_l] have the channels that a neck was built for."""
    given = [level.shape[1] for level in inputs]
    expected = list(in_channels)
    if given != expected:
        raise InvalidInputError(
            f"{neck}: in_channels is {expected}, but the feature maps have {given} channels"
        )


_NEAREST = {"mode": "nearest"}


@MODELS.register_module()
class FPN(BaseModule):
    """Gives every level the same number of channels, and adds the upsampled coarser levels to each level.

    Parameter names: ``lateral_convs.N.conv.*`` (1x1), ``fpn_convs.N.conv.*`` (3x3, extra levels after the others).

    Args:
        in_channels: channels of each input level. out_channels: channels of every output level.
        num_outs: number of output levels.
        start_level: the first input level that is used. end_level: must be -1, which stands for the last level.
        add_extra_convs: how further levels are made. False max-pools the last output. The others use a convolution of
            stride 2, the first of which reads the last used input (True or 'on_input'), the last lateral map
            ('on_lateral') or the last output ('on_output'). Each other one reads the level before it.
        relu_before_extra_convs: whether a ReLU comes before every extra convolution but the first.
        no_norm_on_lateral: must be False, conv_cfg: None. norm_cfg, act_cfg: as in ``ConvModule``.
        upsample_cfg: keywords of ``interpolate``.
        out_groups: number of groups of every 3x3 convolution. With ``out_channels`` groups they are depthwise, which
            saves most of the neck's time on a CPU.

    Raises:
        ValueError: ``add_extra_convs`` is unknown, or ``num_outs`` does not fit.

    Source: Lin et al., CVPR 2017; names and defaults are mmdet's, which has no ``out_groups``.
    """

    def __init__(
        self,
        in_channels: list[int] | tuple[int, ...],
        out_channels: int,
        num_outs: int,
        start_level: int = 0,
        end_level: Literal[-1] = -1,
        add_extra_convs: bool | Literal["on_input", "on_lateral", "on_output"] = False,
        relu_before_extra_convs: bool = False,
        no_norm_on_lateral: Literal[False] = False,
        conv_cfg: None = None,
        norm_cfg: dict[str, Any] | None = None,
        act_cfg: dict[str, Any] | None = None,
        upsample_cfg: dict[str, Any] = _NEAREST,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = _XAVIER,
        out_groups: int = 1,
    ) -> None:
        super().__init__(init_cfg)
        used = in_channels[start_level:]
        num_used = len(used)
        if num_outs < num_used:
            raise InvalidInputError(
                f"FPN: num_outs must be at least the {num_used} levels used, got {num_outs}"
            )
        self.start_level = start_level
        self.in_channels = in_channels
        self.num_extra = num_outs - num_used
        self.add_extra_convs = "on_input" if add_extra_convs is True else add_extra_convs
        self.relu_before_extra_convs = relu_before_extra_convs
        self.upsample_cfg = upsample_cfg
        options: dict[str, Any] = {"norm_cfg": norm_cfg, "act_cfg": act_cfg, "inplace": False}
        self.lateral_convs = nn.ModuleList(ConvModule(width, out_channels, 1, **options) for width in used)
        options.update(groups=out_groups, padding=1)
        self.fpn_convs = nn.ModuleList(ConvModule(out_channels, out_channels, 3, **options) for _ in used)
        if self.add_extra_convs:
            for i in range(self.num_extra):
                width = used[-1] if i == 0 and self.add_extra_convs == "on_input" else out_channels
                self.fpn_convs.append(ConvModule(width, out_channels, 3, stride=2, **options))

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return ``num_outs`` maps [B, out_channels, H_l, W_l] from the backbone's maps [B, C_l, H_l, W_l]."""
        check_feature_maps("FPN", inputs, self.in_channels)
        laterals = [
            conv(level) for conv, level in zip(self.lateral_convs, inputs[self.start_level :], strict=True)
        ]
        for i in range(len(laterals) - 1, 0, -1):
            laterals[i - 1] = self._added(laterals[i - 1], laterals[i])
        outs = [conv(level) for conv, level in zip(self.fpn_convs, laterals, strict=False)]
        last = outs[-1]
        if not self.add_extra_convs:
            for _ in range(self.num_extra):
                last = F.max_pool2d(last, 1, stride=2)
                outs.append(last)
            return tuple(outs)
        source = {"on_input": inputs[-1], "on_lateral": laterals[-1], "on_output": last}[self.add_extra_convs]
        for i, conv in enumerate(self.fpn_convs[len(laterals) :]):
            source = conv(F.relu(source) if i and self.relu_before_extra_convs else source)
            outs.append(source)
        return tuple(outs)

    def _added(self, finer: Tensor, coarser: Tensor) -> Tensor:
        """Return a map plus another one in its size. Autocast would repeat its values in float32."""
        size = finer.shape[-2:]
        repeats = self.upsample_cfg == _NEAREST
        height, width = coarser.shape[-2:]
        is_half = size == (2 * height, 2 * width)
        if repeats and is_half and finer.is_cuda and torch.is_grad_enabled():
            return add_twice_as_large(finer, coarser)
        device = finer.device.type
        with torch.autocast(device, enabled=torch.is_autocast_enabled(device) and not repeats):
            return finer + F.interpolate(coarser, size, **self.upsample_cfg)
