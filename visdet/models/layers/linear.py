"""The linear layer of attention modules and feed-forward blocks."""

import torch
from torch import Tensor, nn

from visdet.ops.fused import autocast_linear, suits_autocast_linear


class Linear(nn.Linear):
    """The linear layer of torch. ``autocast_linear`` computes it for many rows, in training under autocast on CUDA.

    ``torch.ao.quantization.quantize_dynamic`` leaves this layer as it is, because it looks for torch's own class.
    torchao quantises it.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``, [..., out_features]."""
        if suits_autocast_linear(input, self.weight, self.bias):
            return autocast_linear(input, self.weight, self.bias, torch.get_autocast_dtype("cuda"))
        return super().forward(input)
