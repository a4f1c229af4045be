"""The linear layer of attention modules and feed-forward blocks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.ops.fused import autocast_linear, in_autocast_type, suits_autocast_linear

from .plain import is_plain


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``input @ weight.T + bias``, [..., D], of [..., C], [D, C] and [D]; see ``Linear``."""
    if suits_autocast_linear(input, weight, bias):
        dtype = torch.get_autocast_dtype("cuda")
        return autocast_linear(in_autocast_type(input, dtype), weight, bias, dtype)
    return F.linear(input, weight, bias)


def linear_relu_dropout(input: Tensor, layer: nn.Linear, p: float) -> Tensor:
    """Return ``dropout(relu(layer(input)), p)``, [..., D], of a plain layer and its input [..., C]."""
    if p < 1 and suits_autocast_linear(input, layer.weight, layer.bias):
        dtype = torch.get_autocast_dtype("cuda")
        return autocast_linear(in_autocast_type(input, dtype), layer.weight, layer.bias, dtype, p)
    output = layer(input)
    # ReLU overwrites what dropout returns, which saves its memory. If it overwrote the output of a linear layer, which
    # is a view, autograd would copy the gradient.
    return F.relu_(F.dropout(output, p)) if p > 0 else F.relu(output)


def are_alike(chains: Sequence[Any]) -> bool:
    """Return whether chains are plain linear layers with a bias and ReLUs, of the same shapes in each of them."""
    if not all(isinstance(chain, list) or is_plain(chain, nn.Sequential) for chain in chains):
        return False
    first, *others = ([_kind_of(layer) for layer in chain] for chain in chains)
    return None not in first and all(kinds == first for kinds in others)


def _kind_of(layer: nn.Module) -> Any:
    """Return what layers have in common that are computed together, or None if a layer must be called."""
    if is_plain(layer, nn.Linear) and layer.bias is not None:
        return layer.weight.shape
    return nn.ReLU if is_plain(layer, nn.ReLU) else None


def each_of_its_own(chains: Sequence[Sequence[nn.Module]], x: Tensor) -> Tensor:
    """Return [D, N, C'] of x [D, N, C], in which row d has gone through the layers of chain d.

    One batched product computes all layers at one place, each of which alone would not fill a GPU.

    Args:
        chains: linear layers and ReLUs, which are ``are_alike``.
    """
    for layers in zip(*chains, strict=True):
        if isinstance(layers[0], nn.ReLU):
            x = F.relu(x)
        else:
            weight = torch.stack([layer.weight for layer in layers])
            bias = torch.stack([layer.bias for layer in layers])
            x = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
    return x


class Linear(nn.Linear):
    """The linear layer of torch. ``autocast_linear`` computes it for many rows, in training under autocast on CUDA.

    ``torch.ao.quantization.quantize_dynamic`` leaves this layer as it is, because it looks for torch's own class.
    torchao quantises it.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``, [..., out_features]."""
        return linear(input, self.weight, self.bias)
