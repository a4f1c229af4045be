"""A residual block whose activations are computed again in the backward pass, as one node of the autograd graph."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.ops._gpu_rows import has_kernel, packed
from visdet.ops._library import differentiable_once

from ..layers.normalization import BatchNorm2d
from ..layers.precision import as_autocast_input
from ..layers.residual import is_plain

__all__ = ["recomputed_block", "statistics_kept"]

_Layers = Sequence[tuple[nn.Module, nn.Module]]


class _Layer(NamedTuple):
    """A convolution and its batch norm.

    Attributes:
        geometry: the stride, padding and dilation of the convolution. groups: its groups.
        norm: the batch norm. relu: whether a ReLU follows.
    """

    geometry: tuple[Any, Any, Any]
    groups: int
    norm: BatchNorm2d
    relu: bool

    def conv(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution of images x as packed [B, H, W, C]."""
        stride, padding, dilation = self.geometry
        return packed(F.conv2d(x, weight, None, stride, padding, dilation, self.groups).permute(0, 2, 3, 1))

    def normalise(
        self, rows: Tensor, residual: Tensor | None, affine: Sequence[Tensor], updates: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the normalised rows and the statistics. The running ones change if ``updates``."""
        norm = self.norm
        running = (norm.running_mean, norm.running_var, norm.num_batches_tracked) if updates else (None,) * 3
        return torch.ops.visdet.batch_norm_add_relu.default(
            rows, residual, *affine, *running, norm.momentum, norm.eps, self.relu
        )

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        rows: Tensor,
        output: Tensor | None,
        parameters: Sequence[Tensor],
        statistics: Tensor,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
        """Return the gradients of x, of the residual and of the parameters.

        Args:
            grad: [B, H, W, C], that of the output. x: the images that the convolution reads.
            rows: the result of ``conv``. output: [B, H, W, C] if there was a residual, None otherwise.
            parameters: the weight of the convolution, scale and shift. needs: whether x and weight need gradients.
        """
        weight, *affine = parameters
        grad_rows, grad_residual, sums = torch.ops.visdet.batch_norm_add_relu_backward.default(
            grad, rows, output, *affine, statistics, self.relu
        )
        of_x, of_weight, _ = torch.ops.aten.convolution_backward(
            _images(grad_rows), x, weight, None, *self.geometry, False, (0, 0), self.groups, (*needs, False)
        )
        return of_x, grad_residual, [of_weight, *sums.unbind()]


def recomputed_block(
    x: Tensor, main: _Layers, downsample: tuple[nn.Module, nn.Module] | None
) -> Tensor | None:
    """Return the output of a residual block, which keeps no activations for the backward pass but x and the output.

    The output is what ``torch.utils.checkpoint`` would give, without its hooks for each saved tensor. The last
    normalisation is not computed again, because the next block keeps its result anyway. Hooks of layers are not called.

    Args:
        x: [B, C, H, W].
        main: the convolutions of the main path with their normalisations. All but the last are followed by a ReLU, and
            the last one by the sum and a ReLU.
        downsample: what brings x to the shape of the output, or None.

    Returns:
        [B, C', H', W'], or None if the kernels of ``batch_norm_add_relu`` do not serve all layers.
    """
    layers = [*main, *([] if downsample is None else [downsample])]
    if not has_kernel("batch_norm_add_relu", x) or not x.is_contiguous(memory_format=torch.channels_last):
        return None
    if x.dtype != as_autocast_input(x).dtype or not all(_is_served(*layer) for layer in layers):
        return None
    if len(x) * x.shape[2] * x.shape[3] < _MIN_PIXELS:
        return None
    tensors: list[Tensor] = []
    described = []
    for index, (conv, norm) in enumerate(layers):
        assert isinstance(conv, nn.Conv2d) and isinstance(norm, BatchNorm2d)
        tensors += [as_autocast_input(conv.weight), norm.weight, norm.bias]
        geometry = conv.stride, conv.padding, conv.dilation
        described.append(_Layer(geometry, conv.groups, norm, relu=index < len(main)))
    if any(weight.dtype != x.dtype for weight in tensors[::3]):
        return None
    return _Block.apply(described, len(main), x, *tensors)


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Let batch norms in training mode leave their running statistics as they are within the block.

    A block that is computed again has already updated them.
    """
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms if norm.training]
    try:
        for norm, _, count in before:
            norm.momentum, norm.num_batches_tracked = 0.0, None
            if isinstance(norm, nn.SyncBatchNorm) and count is not None:  # It asks for a counter.
                norm.num_batches_tracked = count.clone()
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count


_MIN_PIXELS = 64  # More than one of them is left for each batch norm after a stride of up to 4.
_PACK = 8  # channels that a thread of the kernels holds


def _is_served(conv: nn.Module, norm: nn.Module) -> bool:
    return (
        is_plain(conv, nn.Conv2d)
        and conv.bias is None
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
        and conv.out_channels % _PACK == 0
        and is_plain(norm, BatchNorm2d)
        and norm.training
        and norm.affine
        and norm.momentum is not None
        and norm.track_running_stats
        and norm.weight.dtype == torch.float32
    )


def _images(rows: Tensor) -> Tensor:
    return rows.permute(0, 3, 1, 2)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: list[_Layer], num_main: int, x: Tensor, *tensors: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            statistics: list[Tensor] = []
            residual = packed(x.permute(0, 2, 3, 1))
            for layer, (weight, *affine) in _with_tensors(layers, tensors, num_main, None):
                residual, found = layer.normalise(layer.conv(x, weight), None, affine, updates=True)
                statistics.append(found)
            activation = x
            for index, (layer, (weight, *affine)) in enumerate(_with_tensors(layers, tensors, 0, num_main)):
                added = residual if index == num_main - 1 else None
                rows, found = layer.normalise(layer.conv(activation, weight), added, affine, updates=True)
                activation = _images(rows)
                statistics.append(found)
        ctx.save_for_backward(x, rows, *statistics, *tensors)
        ctx.layers, ctx.num_main = layers, num_main
        return activation

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        layers, num_main = ctx.layers, ctx.num_main
        x, output, *saved = ctx.saved_tensors
        statistics, tensors = saved[: len(layers)], saved[len(layers) :]
        of_downsample, statistics = statistics[: len(layers) - num_main], statistics[len(layers) - num_main :]
        needs_x, *needs = ctx.needs_input_grad[2:]
        grads: list[Any] = [None] * len(tensors)
        with torch.autocast(x.device.type, enabled=False):
            inputs, convolved = [x], []
            for layer, (weight, *affine) in _with_tensors(layers, tensors, 0, num_main):
                convolved.append(layer.conv(inputs[-1], weight))
                if len(convolved) < num_main:
                    inputs.append(_images(layer.normalise(convolved[-1], None, affine, updates=False)[0]))
            grad = packed(grad_output.to(x.dtype).permute(0, 2, 3, 1))
            of_x: Any = None
            grad_residual: Any = None
            for index in reversed(range(num_main)):
                of_x, of_residual, of_layer = layers[index].backward(
                    grad,
                    inputs.pop(),
                    convolved.pop(),
                    output if index == num_main - 1 else None,
                    tensors[3 * index : 3 * index + 3],
                    statistics[index],
                    (index > 0 or needs_x, needs[3 * index]),
                )
                grads[3 * index : 3 * index + 3] = of_layer
                if index == num_main - 1:
                    grad_residual = of_residual
                if index > 0:
                    grad = packed(of_x.permute(0, 2, 3, 1))
            for (layer, parameters), found in zip(
                _with_tensors(layers, tensors, num_main, None), of_downsample, strict=True
            ):
                of_skip, _, grads[3 * num_main :] = layer.backward(
                    grad_residual,
                    x,
                    layer.conv(x, parameters[0]),
                    None,
                    parameters,
                    found,
                    (needs_x, needs[3 * num_main]),
                )
                grad_residual = None if of_skip is None else of_skip.permute(0, 2, 3, 1)
            grad_x = of_x + _images(grad_residual) if needs_x else None
        return None, None, grad_x, *grads


def _with_tensors(
    layers: list[_Layer], tensors: Sequence[Tensor], start: int, end: int | None
) -> Iterator[tuple[_Layer, Sequence[Tensor]]]:
    """Yield the layers from ``start`` to ``end``, each with its weight, scale and shift."""
    for index in range(len(layers))[start:end]:
        yield layers[index], tensors[3 * index : 3 * index + 3]
