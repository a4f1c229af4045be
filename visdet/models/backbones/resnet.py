"""ResNet backbones with torchvision's parameter names."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from visdet.checks.arguments import Range, also_takes
from visdet.errors import InvalidInputError
from visdet.execution.capture import keeps_activations
from visdet.ops.tracing import is_traced
from visdet.registry import MODELS

from ..layers.as_if_unpadded import Padding
from ..layers.frozen_norm import FoldedConv, fold_frozen_norms, with_one_bias
from ..layers.normalization import BatchNorm2d, add_relu, build_norm_layer, norm_abbreviation
from ..layers.pixel_blocks import in_blocks, suits_blocks
from ..layers.plain import is_plain
from .pretrained import Backbone

_BN = {"type": "BN", "requires_grad": True}
_DEFAULT_INIT: list[dict[str, Any]] = [
    {"type": "Kaiming", "layer": "Conv2d"},
    {"type": "Constant", "val": 1, "layer": ["_BatchNorm", "GroupNorm"]},
]


def _norm(norm_cfg: dict[str, Any], channels: int, index: int) -> tuple[str, nn.Module]:
    """Return a normalisation layer and the name that torchvision gives it: bn1, bn2, ... (gn1, ... for group norm)."""
    layer = build_norm_layer(norm_cfg, channels)
    return f"{norm_abbreviation(type(layer))}{index}", layer


class ResidualBlock(nn.Module):
    """Convolutions, each followed by a normalisation and a ReLU. The input is added before the last ReLU.

    Args:
        convs: the convolutions in order, registered as conv1, conv2, ...
        norm_cfg: config of the normalisation after each convolution, registered as bn1, bn2, ...
        downsample: brings the input to the shape of the output, or None if the shapes are equal.
        with_cp: recompute activations in the backward pass instead of keeping them.
    """

    def __init__(
        self,
        convs: Sequence[nn.Conv2d],
        norm_cfg: dict[str, Any],
        downsample: nn.Sequential | None,
        with_cp: bool,
    ) -> None:
        super().__init__()
        self.norm_names = []
        for index, conv in enumerate(convs, start=1):
            name, norm = _norm(norm_cfg, conv.out_channels, index)
            self.norm_names.append(name)
            self.add_module(f"conv{index}", conv)
            self.add_module(name, norm)
        self.downsample = downsample
        self.with_cp = with_cp

    @property
    def main_layers(self) -> list[tuple[nn.Module, nn.Module]]:
        """The convolutions of the main path in order, each with its normalisation."""
        return [
            (getattr(self, f"conv{index}"), getattr(self, name))
            for index, name in enumerate(self.norm_names, start=1)
        ]

    @property
    def layers(self) -> list[tuple[nn.Module, nn.Module]]:
        """All convolutions, the downsampling included, each with its normalisation."""
        main = self.main_layers
        downsample = self.downsample
        if downsample is None or not is_plain(downsample, nn.Sequential):
            return main
        conv, norm = downsample
        return [*main, (conv, norm)]

    def forward(
        self, x: Tensor, folded: Mapping[nn.Module, FoldedConv], padding: Padding | None = None
    ) -> Tensor:
        """Return [B, C', H', W'] from x [B, C, H, W].

        ``folded`` replaces convolutions and their normalisations. With a ``padding``, the maps are those of each image.
        """
        if not self.with_cp or not x.requires_grad or keeps_activations():
            return self._forward(x, folded, padding)
        # torch.compile supports no contexts of one's own.
        contexts: Any = {} if is_traced() else {"context_fn": lambda: (nullcontext(), _statistics_kept(self))}
        # Nothing in a block is drawn at random, and a CUDA graph could not note the generator's state.
        return checkpoint(
            self._forward, x, folded, padding, use_reentrant=False, preserve_rng_state=False, **contexts
        )

    def _forward(
        self, x: Tensor, folded: Mapping[nn.Module, FoldedConv], padding: Padding | None = None
    ) -> Tensor:
        identity = x
        *first_layers, last_layer = self.main_layers
        downsample = self.downsample
        if downsample is not None:
            if is_plain(downsample, nn.Sequential):
                conv, norm = downsample
                last_conv = last_layer[0]
                if conv in folded and last_conv in folded:
                    own, last = with_one_bias(folded[conv], folded[last_conv], x)
                    folded = {**folded, conv: own, last_conv: last}
                identity = _conv_norm(conv, norm, x, folded, relu=False)
            else:
                identity = downsample(x)
        for conv, norm in first_layers:
            x = _conv_norm(conv, norm, x, folded, padding=padding)
        return _conv_norm(*last_layer, x, folded, residual=identity, padding=padding)


class ResidualStage(nn.Sequential):
    """The blocks of a stage, one after another."""

    def forward(  # type: ignore[override]
        self, x: Tensor, folded: Mapping[nn.Module, FoldedConv], padding: Padding | None = None
    ) -> Tensor:
        """Return [B, C', H', W'] from x [B, C, H, W]; see ``ResidualBlock``."""
        for block in self:
            x = block(x, folded, padding)
        return x


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """Let batch norms in training mode leave their running statistics as they are within the block.

    A block that is computed again has already updated them.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms if norm.training]
    try:
        for norm, _, count in before:
            norm.momentum = 0.0
            norm.num_batches_tracked = None
            if isinstance(norm, nn.SyncBatchNorm) and count is not None:  # It asks for a counter.
                norm.num_batches_tracked = count.clone()
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum = momentum
            norm.num_batches_tracked = count


def _is_faster_with_channels_last(x: Tensor, has_folded: bool) -> bool:
    """Return whether images should have their channels last before the first convolution.

    On a GPU, folded weights have that format, and so do 16-bit convolutions and the normalisations after them. On a
    CPU, convolutions and normalisations are faster in it. Float32 training keeps the format of its images, and so the
    rounding of the published code.
    """
    if x.is_cuda:
        return has_folded or torch.is_autocast_enabled("cuda")
    return torch.is_autocast_enabled("cpu") or not torch.is_grad_enabled()


def _conv_norm(
    conv: nn.Module,
    norm: nn.Module,
    x: Tensor,
    folded: Mapping[nn.Module, FoldedConv],
    relu: bool = True,
    residual: Tensor | None = None,
    padding: Padding | None = None,
) -> Tensor:
    """Return norm(conv(x)) + residual, or the ReLU of that sum."""
    if padding is not None:
        x = padding.before(conv, x)
    if conv in folded:
        return folded[conv](x, relu, residual)
    return _normalised(norm, conv(x), relu, residual)


def _normalised(norm: nn.Module, x: Tensor, relu: bool = True, residual: Tensor | None = None) -> Tensor:
    """Return norm(x) + residual, or the ReLU of that sum."""
    if is_plain(norm, BatchNorm2d):
        return norm(x, residual, relu)
    return add_relu(norm(x), residual, relu)


def _basic_convs(in_channels: int, channels: int, stride: int, dilation: int, style: str) -> list[nn.Conv2d]:
    return [
        nn.Conv2d(in_channels, channels, 3, stride, padding=dilation, dilation=dilation, bias=False),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
    ]


def _bottleneck_convs(
    in_channels: int, channels: int, stride: int, dilation: int, style: str
) -> list[nn.Conv2d]:
    stride1, stride2 = (1, stride) if style == "pytorch" else (stride, 1)
    return [
        nn.Conv2d(in_channels, channels, 1, stride1, bias=False),
        nn.Conv2d(channels, channels, 3, stride2, padding=dilation, dilation=dilation, bias=False),
        nn.Conv2d(channels, channels * 4, 1, bias=False),
    ]


@MODELS.register_module()
class ResNet(Backbone):
    """ResNet-18, 34, 50, 101 or 152, which returns the feature maps of chosen stages.

    A convolution and its frozen batch norm run as one convolution; see ``fold_frozen_norms``.

    Args:
        depth: 18, 34, 50, 101 or 152.
        in_channels: channels of the image.
        stem_channels: channels of the first convolution. The default is ``base_channels``.
        base_channels: channels of the first stage, before the expansion. Each further stage has twice as many.
        num_stages: number of stages, 1 to 4. strides, dilations: those of each stage.
        out_indices: the stages to return, counted from 0.
        style: the convolution of a bottleneck that has the stride. It is the 3x3 convolution for 'pytorch', and the
            first 1x1 convolution for 'caffe'.
        frozen_stages: the number of stages that are frozen together with the stem. Frozen parts are not trained and
            do not update their statistics. 0 freezes the stem only, -1 freezes nothing.
        norm_cfg: config for ``build_norm_layer``.
        norm_eval: whether batch norm uses its stored statistics in training, too.
        with_cp: recompute each block's activations in the backward pass instead of keeping them. A CUDA graph keeps
            them nevertheless where half of the GPU's memory stays free.
        zero_init_residual: whether the scale of each block's last normalisation starts at 0.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` (see ``load_pretrained``) or mmengine's initialisers. By
            default, convolutions get Kaiming's normal distribution, and normalisations scale 1 and shift 0.
        pretrained: the checkpoint, as a short form of ``init_cfg=dict(type='Pretrained', checkpoint=...)``.

    Raises:
        ValueError: an option is out of range, or ``pretrained`` and ``init_cfg`` are both given.

    Source: He et al., CVPR 2016; parameter names are torchvision's, keywords mmdet's.
    """

    ARCHITECTURES = {
        18: (_basic_convs, 1, (2, 2, 2, 2)),
        34: (_basic_convs, 1, (3, 4, 6, 3)),
        50: (_bottleneck_convs, 4, (3, 4, 6, 3)),
        101: (_bottleneck_convs, 4, (3, 4, 23, 3)),
        152: (_bottleneck_convs, 4, (3, 8, 36, 3)),
    }

    @also_takes(deep_stem=False, avg_down=False, conv_cfg=None, dcn=None, stage_with_dcn=..., plugins=None)
    def __init__(
        self,
        depth: Literal[18, 34, 50, 101, 152],
        in_channels: int = 3,
        stem_channels: int | None = None,
        base_channels: int = 64,
        num_stages: Annotated[int, Range(1, 4)] = 4,
        strides: Sequence[int] = (1, 2, 2, 2),
        dilations: Sequence[int] = (1, 1, 1, 1),
        out_indices: Sequence[int] = (0, 1, 2, 3),
        style: Literal["pytorch", "caffe"] = "pytorch",
        frozen_stages: Annotated[int, Range(-1, 4)] = -1,
        norm_cfg: dict[str, Any] = _BN,
        norm_eval: bool = True,
        with_cp: bool = False,
        zero_init_residual: bool = True,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
        pretrained: str | None = None,
    ) -> None:
        if pretrained is not None:
            if init_cfg is not None:
                raise InvalidInputError("ResNet: pretrained and init_cfg cannot both be given")
            init_cfg = {"type": "Pretrained", "checkpoint": pretrained}
        super().__init__(init_cfg, _DEFAULT_INIT, num_stages, out_indices, frozen_stages)
        _, expansion, num_blocks = self.ARCHITECTURES[depth]
        self.depth = depth
        self.style = style
        self.norm_cfg = norm_cfg
        self.with_cp = with_cp
        self.norm_eval = norm_eval
        self.zero_init_residual = zero_init_residual

        stem_channels = stem_channels or base_channels
        self.conv1 = nn.Conv2d(in_channels, stem_channels, 7, stride=2, padding=3, bias=False)
        self.norm1_name, norm1 = _norm(norm_cfg, stem_channels, 1)
        self.add_module(self.norm1_name, norm1)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)

        self.stage_names = []
        channels_in = stem_channels
        for stage in range(num_stages):
            channels = base_channels * 2**stage
            blocks = self._stage(channels_in, channels, num_blocks[stage], strides[stage], dilations[stage])
            channels_in = channels * expansion
            name = f"layer{stage + 1}"
            self.stage_names.append(name)
            self.add_module(name, blocks)
        self.freeze()

    def _stage(
        self, channels_in: int, channels: int, num_blocks: int, stride: int, dilation: int
    ) -> ResidualStage:
        """Return the blocks of one stage. The first of them has the stride."""
        make_convs, expansion, _ = self.ARCHITECTURES[self.depth]
        channels_out = channels * expansion
        blocks = []
        for _ in range(num_blocks):
            downsample = None
            if stride != 1 or channels_in != channels_out:
                downsample = nn.Sequential(
                    nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                    build_norm_layer(self.norm_cfg, channels_out),
                )
            convs = make_convs(channels_in, channels, stride, dilation, self.style)
            blocks.append(ResidualBlock(convs, self.norm_cfg, downsample, self.with_cp))
            channels_in = channels_out
            stride = 1
        return ResidualStage(*blocks)

    def init_weights(self) -> None:
        """Initialise all weights, then load the pretrained weights that the config names."""
        super().init_weights()
        if self.zero_init_residual:
            for block in self.modules():
                if isinstance(block, ResidualBlock):
                    _, norm = block.main_layers[-1]
                    nn.init.zeros_(norm.get_parameter("weight"))
        self.load_pretrained()

    @property
    def layers(self) -> list[tuple[nn.Module, nn.Module]]:
        """All convolutions, the stem's first, each with its normalisation."""
        layers: list[tuple[nn.Module, nn.Module]] = [(self.conv1, getattr(self, self.norm1_name))]
        for name in self.stage_names:
            for block in getattr(self, name):
                layers += block.layers
        return layers

    def _stem(self, x: Tensor, folded: Mapping[nn.Module, FoldedConv], padding: Padding | None) -> Tensor:
        """Return the normalised map of the first convolution, on a GPU after a ReLU."""
        conv, norm = self.conv1, getattr(self, self.norm1_name)
        if suits_blocks(conv, x):
            x = x if padding is None else padding.before(conv, x)
            layer = folded.get(conv, conv)
            x, weight = in_blocks(x, layer.weight)
            conv_of_blocks = FoldedConv(weight, layer.bias)
            return conv_of_blocks(x) if conv in folded else _normalised(norm, conv_of_blocks(x, relu=False))
        if _is_faster_with_channels_last(x, bool(folded)):
            x = x.contiguous(memory_format=torch.channels_last)
        return _conv_norm(conv, norm, x, folded, relu=x.is_cuda, padding=padding)

    def forward(self, x: Tensor, padding: Padding | None = None) -> tuple[Tensor, ...]:
        """Return the maps [B, C_i, H_i, W_i] of stages ``out_indices`` from images x [B, in_channels, H, W].

        With a ``padding``, they are those of each image alone.
        """
        folded = fold_frozen_norms(self.layers)
        # A ReLU after the pooling gives the same numbers and gradients, and has a quarter of the pixels.
        x = self._stem(x, folded, padding)
        x = self.maxpool(x if padding is None else padding.cleared(x))
        x = x if x.is_cuda else F.relu(x, inplace=True)
        outs = []
        for index, name in enumerate(self.stage_names):
            x = getattr(self, name)(x, folded, padding)
            if index in self.out_indices:
                outs.append(x)
        return tuple(outs)

    def train(self, mode: bool = True) -> "ResNet":
        """Set the mode. Frozen parts, and with ``norm_eval`` every batch norm, stay in evaluation mode."""
        super().train(mode)
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def frozen_parts(self) -> list[nn.Module]:
        stages = [getattr(self, name) for name in self.stage_names[: self.frozen_stages]]
        return [self.conv1, getattr(self, self.norm1_name), *stages]
