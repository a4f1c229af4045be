"""Layers of the deformable convolutions, which take their offsets as inputs, and packs that predict the offsets."""

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._arguments import check_that, pair
from .._renamed import renamed_arguments
from ..deform_conv2d import Pair, deform_conv2d
from ..modulated_deform_conv2d import modulated_deform_conv2d

__all__ = [
    "DeformConv2d",
    "DeformConv2dPack",
    "ModulatedDeformConv2d",
    "ModulatedDeformConv2dPack",
    "rename_offset_layers_on_load",
]


class _Layer(nn.Module):
    """The base class of both convolutions, with their settings and their weight."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
        deform_groups: int,
    ) -> None:
        super().__init__()
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            divides = channels % groups == 0
            check_that(divides, type(self).__name__, name, "divide by groups {}", channels, groups)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = pair(kernel_size)
        self.stride, self.padding, self.dilation = pair(stride), pair(padding), pair(dilation)
        self.groups, self.deform_groups = groups, deform_groups
        self.transposed, self.output_padding = False, (0,)  # mmcv's ConvModule reads them as nn.Conv2d's
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"deform_groups={self.deform_groups}, bias={getattr(self, 'bias', None) is not None}"
        )


class DeformConv2d(_Layer):
    """A deformable convolution with a weight and no bias, whose offsets are an input. See ``deform_conv2d``."""

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
        bias: bool = False,
        im2col_step: int = 32,
    ) -> None:
        check_that(not bias, "DeformConv2d", "bias", "be False", bias)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, deform_groups
        )
        self.im2col_step = im2col_step
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, nonlinearity="relu")

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        """Return the convolution. A map smaller than the kernel is padded to its size, and the result is cropped."""
        kernel_h, kernel_w = self.kernel_size
        pad_h = max(kernel_h - x.shape[2], 0)
        pad_w = max(kernel_w - x.shape[3], 0)
        if not (pad_h or pad_w):
            return self._convolve(x, offset)
        x, offset = (F.pad(tensor, (0, pad_w, 0, pad_h)) for tensor in (x, offset))
        output = self._convolve(x, offset)
        return output[:, :, : output.shape[2] - pad_h, : output.shape[3] - pad_w].contiguous()

    def _convolve(self, x: Tensor, offset: Tensor) -> Tensor:
        return deform_conv2d(
            x,
            offset,
            self.weight,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.deform_groups,
            im2col_step=self.im2col_step,
        )


class ModulatedDeformConv2d(_Layer):
    """A modulated deformable convolution with a weight and a bias, whose offsets and mask are inputs."""

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
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, deform_groups
        )
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.init_weights()

    def init_weights(self) -> None:
        bound = 1 / math.sqrt(self.in_channels * math.prod(self.kernel_size))
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


class _Pack(_Layer):
    """A deformable convolution that predicts its offsets by a layer of its own, ``conv_offset``, which starts at zero.

    Its state dicts are of version 2, with mmcv's names. In version 1 the layer stood beside the convolution, as
    ``<name>_offset``. After ``rename_offset_layers_on_load``, a model can load such state dicts.
    """

    _version = 2
    _fields_of_tap: int  # the number of channels of conv_offset for each tap of each group

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conv_offset = nn.Conv2d(
            self.in_channels,
            self.deform_groups * self._fields_of_tap * math.prod(self.kernel_size),
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
        )
        self.init_offset()

    def init_offset(self) -> None:
        for parameter in self.conv_offset.parameters():
            nn.init.zeros_(parameter)

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        _rename_offset_layer(state_dict, prefix)  # of a loader that hands every module the whole state dict
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # torch and mmengine pass a module the entries below its own name. The parent has reported the layer beside it.
        old = f"{prefix[:-1]}_offset.weight"
        if old in unexpected_keys:
            warnings.warn(
                f"{type(self).__name__}: the state dict is of version 1, and its offset layer {old!r} is not loaded; "
                "call visdet.ops.mmcv.deform_conv_layers.rename_offset_layers_on_load(model) before",
                stacklevel=2,
            )


class DeformConv2dPack(_Pack, DeformConv2d):
    """A deformable convolution that predicts its own offsets, which start at 0. Its name in configs is 'DCN'."""

    _fields_of_tap = 2

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self._convolve(x, self.conv_offset(x))


class ModulatedDeformConv2dPack(_Pack, ModulatedDeformConv2d):
    """A modulated deformable convolution that predicts its own offsets and masks. Its name in configs is 'DCNv2'.

    Offsets start at 0 and masks at 0.5. The first two thirds of ``conv_offset``'s channels are the offsets, and the
    last third is the masks before the sigmoid.
    """

    _fields_of_tap = 3

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.init_weights()

    def init_weights(self) -> None:
        super().init_weights()
        if hasattr(self, "conv_offset"):
            self.init_offset()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        first, second, mask = self.conv_offset(x).chunk(3, dim=1)
        return super().forward(x, torch.cat([first, second], 1), mask.sigmoid())


def rename_offset_layers_on_load(model: nn.Module) -> None:
    """Let a model load state dicts of version 1, whose offset layers stand beside their convolutions.

    ``<name>_offset.weight`` of the state dict becomes ``<name>.conv_offset.weight``, and the bias likewise, for each
    ``DeformConv2dPack`` and ``ModulatedDeformConv2dPack`` in the model. State dicts of version 2 load as before. The
    renaming is done by a hook on each parent of a pack, because loaders pass a pack only the entries below its own
    name. This function is therefore called once on the finished model, before any loader. Copies of the model keep the
    hooks.
    """
    for parent in model.modules():
        if any(isinstance(child, _Pack) for child in parent.children()):
            parent.register_load_state_dict_pre_hook(_rename_offset_layers)


def _rename_offset_layers(parent: nn.Module, state_dict: dict, prefix: str, *_: Any) -> None:
    for name, child in parent.named_children():
        if isinstance(child, _Pack):
            _rename_offset_layer(state_dict, f"{prefix}{name}.")


def _rename_offset_layer(state_dict: dict, prefix: str) -> None:
    """Rename the entries of the offset layer of the pack below ``prefix``, in place."""
    for name in ("weight", "bias"):
        old, new = f"{prefix[:-1]}_offset.{name}", f"{prefix}conv_offset.{name}"
        if new not in state_dict and old in state_dict:
            state_dict[new] = state_dict.pop(old)
