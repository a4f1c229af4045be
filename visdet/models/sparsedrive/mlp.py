"""The multilayer perceptrons that all parts of SparseDrive use."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visdet.ops.perceptrons import PerceptronLayer, perceptrons
from visdet.ops.tracing import is_traced

from ..layers.normalization import ReLULayerNorm
from ..layers.precision import in_full_precision
from ..layers.residual import is_plain

__all__ = ["Perceptron", "Scale", "linear_relu_ln", "side_by_side"]


class Scale(nn.Module):
    """Multiplies each channel by a learnable factor, the parameter ``scale``."""

    def __init__(self, scale: float | Sequence[float] = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., C] times ``scale``, which is [C] or a scalar."""
        return x * self.scale


class Perceptron(nn.Sequential):
    """A sequence of linear layers, ReLUs, normalisations and at last a ``Scale``, which one kernel of a GPU computes.

    The kernel computes in float32, under autocast too; see ``visdet.ops.perceptrons``. Sequences that it does not know,
    layers with hooks, and other devices run layer by layer.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of all layers, [..., channels of the last layer]."""
        layers = self.kernel_layers(x)
        return super().forward(x) if layers is None else perceptrons(x.float(), [layers])

    def in_full_precision(self, x: Tensor) -> Tensor:
        """Return the result in the dtype of the weights, without autocast."""
        layers = self.kernel_layers(x)
        return in_full_precision(self, x) if layers is None else perceptrons(x.float(), [layers])

    def kernel_layers(self, x: Tensor) -> list[PerceptronLayer] | None:
        """Return the layers as ``perceptrons`` takes them, or None if they have to run one by one."""
        if not x.is_cuda or is_traced():
            return None
        layers: list[PerceptronLayer] = []
        module: Any
        for module in self:
            kind = type(module)
            if not is_plain(module, kind):
                return None
            if kind is nn.Linear and module.weight.dtype == torch.float32 and module.bias is not None:
                layers.append(PerceptronLayer(module.weight, module.bias))
            elif not layers or layers[-1].factor is not None:
                return None
            elif kind is nn.ReLU and not layers[-1].relu:
                layers[-1] = layers[-1]._replace(relu=True)
            elif kind is ReLULayerNorm and module.eps == _EPS:
                layers[-1] = layers[-1]._replace(relu=True, factor=module.weight, offset=module.bias)
            elif kind is Scale and module.scale.dim() == 1:
                layers[-1] = layers[-1]._replace(factor=module.scale)
            elif kind is not nn.Identity:
                return None
        return layers


_EPS = nn.LayerNorm(1).eps


def side_by_side(modules: Sequence[Perceptron], x: Tensor, first_columns: Sequence[int]) -> Tensor:
    """Return the results of perceptrons, concatenated, each of which reads the columns of x from its first one on.

    They are computed in full precision.
    """
    layers = [module.kernel_layers(x) for module in modules]
    known = [of_one for of_one in layers if of_one is not None]
    if len(known) == len(layers):
        return perceptrons(x.float(), known, first_columns)
    widths = [next(module.parameters()).shape[1] for module in modules]
    parts = [
        module.in_full_precision(x[..., first : first + width])
        for module, first, width in zip(modules, first_columns, widths, strict=True)
    ]
    return torch.cat(parts, dim=-1)


def linear_relu_ln(
    embed_dims: int, in_loops: int, out_loops: int, input_dims: int | None = None
) -> list[nn.Module]:
    """Return ``out_loops`` times (``in_loops`` times (Linear, ReLU), LayerNorm), all of width ``embed_dims``.

    The last ReLU before a LayerNorm is part of it. An ``nn.Identity`` has its place, which keeps parameter names.

    Args:
        input_dims: width of the input, by default ``embed_dims``.

    Source: the name and the order of layers, and thus the names of parameters, are SparseDrive's.
    """
    # The ReLU is not in place. A Linear of [B, N, C] returns a view, and its gradient would be copied four times in the
    # backward pass if the view were overwritten.
    layers: list[nn.Module] = []
    width = embed_dims if input_dims is None else input_dims
    for _ in range(out_loops):
        for i in range(in_loops):
            layers += [nn.Linear(width, embed_dims), nn.ReLU() if i + 1 < in_loops else nn.Identity()]
            width = embed_dims
        layers.append(ReLULayerNorm(embed_dims))
    return layers
