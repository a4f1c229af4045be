"""The multilayer perceptrons that all parts of SparseDrive use."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..layers.normalization import ReLULayerNorm


class Scale(nn.Module):
    """Multiplies each channel by a learnable factor, the parameter ``scale``."""

    def __init__(self, scale: float | Sequence[float] = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., C] times ``scale``, which is [C] or a scalar."""
        return x * self.scale


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
