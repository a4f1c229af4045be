"""The multilayer perceptrons that every part of SparseDrive is made of."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..layers.normalization import LayerNorm

__all__ = ["Scale", "linear_relu_ln"]


def linear_relu_ln(
    embed_dims: int, in_loops: int, out_loops: int, input_dims: int | None = None
) -> list[nn.Module]:
    """Return ``out_loops`` times (``in_loops`` times (Linear, ReLU), LayerNorm), all of width ``embed_dims``.

    Args:
        input_dims: width of the input, default ``embed_dims``.

    Source: the name and the order, hence the parameter names, are SparseDrive's.
    """
    # Not in place: a Linear of [B, N, C] returns a view, whose gradient would be copied four times on its way back.
    layers: list[nn.Module] = []
    width = embed_dims if input_dims is None else input_dims
    for _ in range(out_loops):
        for _ in range(in_loops):
            layers += [nn.Linear(width, embed_dims), nn.ReLU()]
            width = embed_dims
        layers.append(LayerNorm(embed_dims))
    return layers


class Scale(nn.Module):
    """A learnable factor on each channel; parameter ``scale``."""

    def __init__(self, scale: float | Sequence[float] = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., C] times ``scale``, C numbers or one."""
        return x * self.scale
