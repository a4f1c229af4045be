"""The linear layer of attention modules and feed-forward blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.ops.fused import autocast_linear, in_autocast_type, suits_autocast_linear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``input @ weight.T + bias``, [..., D], of [..., C], [D, C] and [D]; see ``Linear``."""
    if suits_autocast_linear(input, weight, bias):
        dtype = torch.get_autocast_dtype("cuda")
        return autocast_linear(in_autocast_type(input, dtype), weight, bias, dtype)
    return F.linear(input, weight, bias)


class Linear(nn.Linear):
    """The linear layer of torch. ``autocast_linear`` computes it for many rows, in training under autocast on CUDA.

    ``torch.ao.quantization.quantize_dynamic`` leaves this layer as it is, because it looks for torch's own class.
    torchao quantises it.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``, [..., out_features]."""
        return linear(input, self.weight, self.bias)
